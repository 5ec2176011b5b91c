// The steps of the split attention that codes take in place of 16-bit values: see attend_split.cu and attend_codes.cuh.
#pragma once

#include "attend_codes.cuh"
#include "attend_split.cuh"

namespace tl {

// This lane's dims of a query's codes, into the tile.
TL_DEVICE void put_query(const Split &s, int i, const QueryCodes<8> &q, int head_pad) {
  const int pad = code_pad(head_pad), dim = lane_id() * 8;
  if (dim < pad) {
    uint8_t *to = s.q + k_code_at(i, dim);
    *(uint2 *)to = make_uint2(q.high[0], q.high[1]);
    *(uint2 *)(to + kTileQueries * pad) = make_uint2(q.low[0], q.low[1]);
  }
  if (dim == 0) s.q_scale[i] = q.scale;
}

// The queries' codes from their buffer.
template <class Kv>
TL_DEVICE void fetch_query_codes(const AttendArgs &a, const Split &s, int n_queries) {
  const int pad = code_pad(a.place.kv.head_pad), pieces = pad / 8, row_bytes = query_nbytes(Kv::kDtype, a.place.kv.head_pad);
  for (int i = threadIdx.x; i < n_queries * pieces; i += kThreads) {
    const int at = i / pieces, piece = i % pieces, low = piece / (pieces / 2), dim = piece % (pieces / 2) * 16;
    const Query &q = s.query[at];
    if (q.row < 0) continue;
    const uint8_t *from = (const uint8_t *)a.place.q + ((int64_t)q.row * a.place.n_heads + q.head) * row_bytes;
    *(uint4 *)(s.q + low * kTileQueries * pad + k_code_at(at, dim)) = *(const uint4 *)(from + piece * 16);
    if (piece == 0) s.q_scale[at] = *(const float *)(from + 2 * pad);
  }
}

// A finished head of the row placed here: q to the tile, k and v to the page and to new_k, new_v. part: below 0, 0, 1; stores: the page too.
template <class Kv>
TL_DEVICE void place_codes(const PlaceArgs &p, const Split &s, const float *v, int i, int part, uint8_t *page, int slot, bool stores) {
  float x[8];
  load_dims(x, v, p.kv.head_pad, lane_id());
  turn_head(x, p.turn, p.turn_scale, lane_id());
  if (part < 0) return put_query(s, i, query_codes(x), p.kv.head_pad);
  const uint4 codes = kept_codes(!part || Kv::kValueBits == 8 ? codes_int8(x) : codes_int4(x, p.head_dim, lane_id()));
  if (lane_id() * 8 >= p.kv.head_pad) return;
  (part ? s.new_v : s.new_k)[lane_id()] = codes;
  if (stores) store_codes<Kv>(page, p.kv.head_pad, slot, codes, part);
}

// P V of the team's chunk, and its l, to the round's state; each warp its share of V's rows of bytes.
template <class Kv>
TL_DEVICE void weigh_code_chunk(const AttendArgs &a, const Split &s, int n_queries) {
  const int w = warp_id() % kTeamWarps, lane = lane_id(), head_pad = a.place.kv.head_pad, page_bytes = a.place.kv.v_nbytes;
  float p[kPagesOfChunk][2][4];
#pragma unroll
  for (int i = 0; i < kPagesOfChunk * 2; i++) {
    const float4 u = ((const float4 *)s.p)[(i / 2 * 32 + lane) * 2 + i % 2];
    float (&x)[4] = p[i / 2][i % 2];
    x[0] = u.x, x[1] = u.y, x[2] = u.z, x[3] = u.w;
  }
  if (w == 0) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float l = sum_of_chunk(p, h);
      if (lane % 4 == 0) s.l[lane / 4 + 8 * h] = l;
    }
  }
  WeightOperands weights;
  if (Kv::kValueBits == 8) weigh_group<Kv>(weights, p, s.v, page_bytes, head_pad, 0);
#pragma unroll 1
  for (int unit = w; unit * Kv::kUnitDims < head_pad; unit += kTeamWarps)
    weigh_unit<Kv>(weights, p, s.v, page_bytes, head_pad, unit, [&](int b, const float (&o)[2][4]) { leave_block(s, b, o, n_queries, head_pad); });
}

// O / l of the run's queries with their heads turned back, to the operand of the next product, padding included: a warp a query, which reads its dims from the CTAs that have them.
TL_DEVICE void store_turned(const AttendArgs &a, const Split &s, const Run &run, int n_queries, int slice) {
  const int head_pad = a.place.kv.head_pad, head_dim = a.place.head_dim, first = cluster_rank() * slice, q_dim = a.place.n_heads * head_dim;
  for (int i = threadIdx.x; i < slice && first + i < n_queries * head_pad; i += kThreads) {
    const float l = s.total_l[(first + i) / head_pad];
    s.total_o[i] = l != 0.0f ? s.total_o[i] * (1.0f / l) : 0.0f;
  }
  cluster_sync();
  const int lane = lane_id(), dim = lane * 8;
#pragma unroll 1
  for (int q = run.begin + warp_id() * cluster_size() + cluster_rank(); q < run.end; q += kWarps * cluster_size()) {
    const Query query = s.query[q];
    if (query.row < 0) continue;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const int at = q * head_pad + dim + i;
      const float4 four = dim < head_pad ? *(const float4 *)of_cluster_rank(s.total_o + at % slice, at / slice) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
    turn_head(x, a.place.turn, a.place.turn_scale, lane);
#pragma unroll
    for (int i = 0; i < 8; i += 2)
      if (dim + i < head_dim) store_operand_pair(a.out, query.row, query.head * head_dim + dim + i, x[i], x[i + 1]);
    if (query.head == a.place.n_heads - 1)
#pragma unroll 1
      for (int k = q_dim + lane_id(); k < a.out.n_in; k += 32) store_operand(a.out, query.row, k, 0.0f);
  }
  cluster_sync();  // nobody empties a slice that another reads
}

}  // namespace tl
