// y = W a for up to twelve batch rows: panels of sixteen outputs, one lane an output.
//
// Every output sums its K-chunks of TL_K_CHUNK in index order, each from zero and each a chain of one instruction per
// step, whatever the number of rows or panels in flight: rows and panels only decide how many chains run side by side.
// int8 sums groups of TL_INT8_GROUP exactly in int32, and adds them scaled in float32, in index order.
#include "matmul.h"

namespace tl {
namespace TL_ISA_NS {

template <class Dot, int MR, int NR>
static void tile(const uint8_t *w, uint64_t panel_nbytes, const typename Dot::A *a, int n_steps, float *out, int out_stride) {
  vf total[MR][NR];
  TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) total[r][j] = zero();
  for (int begin = 0; begin < n_steps; begin += Dot::kChunkSteps) {
    const int end = begin + Dot::kChunkSteps < n_steps ? begin + Dot::kChunkSteps : n_steps;
    vf acc[MR][NR];
    TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) acc[r][j] = zero();
    for (int k = begin; k < end; k++) {
      typename Dot::W wk[NR];
      TL_UNROLL for (int j = 0; j < NR; j++) wk[j] = Dot::load_w(w + j * panel_nbytes, k);
      TL_UNROLL for (int r = 0; r < MR; r++) {
        const typename Dot::B b = Dot::broadcast(a + k * MR + r);
        TL_UNROLL for (int j = 0; j < NR; j++) acc[r][j] = Dot::step(wk[j], b, acc[r][j]);
      }
    }
    TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) total[r][j] = add(total[r][j], acc[r][j]);
  }
  TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) store(out + r * out_stride + j * kLanes, total[r][j]);
}

template <int MR, int NR>
static void tile_int8(const uint8_t *w, uint64_t panel_nbytes, const float *scales, int scale_panel, int scale_groups, const Int8Block &a,
                      int n_groups, float *out, int out_stride) {
  vf total[MR][NR];
  TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) total[r][j] = zero();
  for (int g = 0; g < n_groups; g++) {
    vi acc[MR][NR];
    TL_UNROLL for (int r = 0; r < MR; r++) {
      const vi start = Int8Dot::start(a.correction + g * MR + r);
      TL_UNROLL for (int j = 0; j < NR; j++) acc[r][j] = start;
    }
    for (int k = g * Int8Dot::kGroupSteps; k < (g + 1) * Int8Dot::kGroupSteps; k++) {
      Int8Dot::W wk[NR];
      TL_UNROLL for (int j = 0; j < NR; j++) wk[j] = Int8Dot::load_w(w + j * panel_nbytes, k);
      TL_UNROLL for (int r = 0; r < MR; r++) {
        const vi b = Int8Dot::broadcast(a.quads + k * MR + r);
        TL_UNROLL for (int j = 0; j < NR; j++) acc[r][j] = Int8Dot::step(wk[j], b, acc[r][j]);
      }
    }
    if (scale_groups) {
      const float *s = scales + (uint64_t)(g / scale_groups) * kLanes;
      TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) total[r][j] =
          fma(mul(to_float(acc[r][j]), load(s + j * scale_panel)), set1(a.scale[g * MR + r]), total[r][j]);
    } else {
      TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) total[r][j] =
          fma(to_float(acc[r][j]), set1(a.scale[g * MR + r]), total[r][j]);
    }
  }
  TL_UNROLL for (int r = 0; r < MR; r++) TL_UNROLL for (int j = 0; j < NR; j++) {
    if (!scale_groups) total[r][j] = mul(total[r][j], load(scales + j * scale_panel));
    store(out + r * out_stride + j * kLanes, total[r][j]);
  }
}

// Calls run<NR>(first panel) for panels in tiles of at most NR, as equal as can be: a narrow last tile would wait for its chains.
template <int NR, class Run>
static void in_tiles(int n_panels, Run run) {
  const int n_tiles = (n_panels + NR - 1) / NR;
  for (int i = 0, p = 0; i < n_tiles; i++) {
    const int n = (n_panels - p) / (n_tiles - i);
    run.template operator()<NR>(p, n);
    p += n;
  }
}

template <class Dot, int MR>
struct FloatTiles {
  const uint8_t *data;
  uint64_t nbytes;
  const void *block;
  int n_steps;
  float *out;
  int out_stride;

  template <int NR>
  void operator()(int p, int n) const {
    if (n == NR) return tile<Dot, MR, NR>(data + p * nbytes, nbytes, (const typename Dot::A *)block, n_steps, out + p * kLanes, out_stride);
    if constexpr (NR > 1) this->template operator()<NR - 1>(p, n);
  }
};

template <class Dot, int MR>
static void panels(const tl_matrix *w, int panel, int n_panels, const void *block, float *out, int out_stride) {
  const uint64_t nbytes = panel_nbytes(w->dtype, w->n_in);
  const uint8_t *data = (const uint8_t *)w->data + panel * nbytes;
  in_tiles<panels_in_flight(MR)>(n_panels, FloatTiles<Dot, MR>{data, nbytes, block, steps(w->dtype, w->n_in), out, out_stride});
}

template <int MR>
struct Int8Tiles {
  const uint8_t *data;
  uint64_t nbytes;
  const float *scales;
  int n_scales, scale_groups;
  Int8Block a;
  int n_groups;
  float *out;
  int out_stride;

  template <int NR>
  void operator()(int p, int n) const {
    if (n == NR)
      return tile_int8<MR, NR>(data + p * nbytes, nbytes, scales + (uint64_t)p * n_scales * kLanes, n_scales * kLanes, scale_groups, a, n_groups,
                               out + p * kLanes, out_stride);
    if constexpr (NR > 1) this->template operator()<NR - 1>(p, n);
  }
};

template <int MR>
static void panels_int8(const tl_matrix *w, int panel, int n_panels, const void *block, float *out, int out_stride) {
  const int n_groups = round_up(w->n_in, TL_INT8_GROUP) / TL_INT8_GROUP, n_scales = scale_count(w);
  const uint64_t nbytes = panel_nbytes(w->dtype, w->n_in);
  const uint8_t *data = (const uint8_t *)w->data + panel * nbytes;
  const float *scales = scale_data(w) + (uint64_t)panel * n_scales * kLanes;
  const Int8Block a = int8_block(block, n_groups, MR);
  in_tiles<panels_in_flight_int8(MR)>(n_panels,
                                      Int8Tiles<MR>{data, nbytes, scales, n_scales, w->group_size / TL_INT8_GROUP, a, n_groups, out, out_stride});
}

// One function per number of rows; panels_in_flight(MR) keeps MR * NR accumulators, NR weights and one operand in registers.
template <class Dot, int MR>
static void dispatch_rows(const tl_matrix *w, int panel, int n_panels, const void *block, int n_rows, float *out, int out_stride) {
  if (n_rows == MR) return panels<Dot, MR>(w, panel, n_panels, block, out, out_stride);
  if constexpr (MR > 1) dispatch_rows<Dot, MR - 1>(w, panel, n_panels, block, n_rows, out, out_stride);
}

template <int MR>
static void dispatch_rows_int8(const tl_matrix *w, int panel, int n_panels, const void *block, int n_rows, float *out, int out_stride) {
  if (n_rows == MR) return panels_int8<MR>(w, panel, n_panels, block, out, out_stride);
  if constexpr (MR > 1) dispatch_rows_int8<MR - 1>(w, panel, n_panels, block, n_rows, out, out_stride);
}

void matmul(const tl_matrix *w, int panel, int n_panels, const void *block, int n_rows, float *out, int out_stride) {
  switch (w->dtype) {
    case TL_F32: return dispatch_rows<DotF32, kBlockRows>(w, panel, n_panels, block, n_rows, out, out_stride);
    case TL_BF16: return dispatch_rows<DotBf16, kBlockRows>(w, panel, n_panels, block, n_rows, out, out_stride);
    case TL_F16: return dispatch_rows<DotF16, kBlockRows>(w, panel, n_panels, block, n_rows, out, out_stride);
    default: return dispatch_rows_int8<kBlockRowsInt8>(w, panel, n_panels, block, n_rows, out, out_stride);
  }
}

}  // namespace TL_ISA_NS
}  // namespace tl
