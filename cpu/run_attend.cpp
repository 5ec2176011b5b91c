// Attention over the pages of each row's sequence, in chunks of 64 keys at absolute positions.
//
// A query's chunks merge in ascending order inside groups of TL_CHUNK_GROUP, then the groups in ascending order, whoever
// computed them: with many rows one thread takes a block of queries through all chunks, with few rows threads share a
// query's chunks, leave the states in scratch, and whoever finishes last merges them.
#include <string.h>

#include <algorithm>

#include "run.h"

namespace tl {
namespace {

int merged_window(const Worker &w, const tl_phase &p) {
  const int a = w.batch.window, b = p.window;
  return a && b ? std::min(a, b) : a + b;
}

struct Keys {
  int first, last;  // positions that a row reads, both included
};

Keys keys_of(int pos, int window) { return {window && pos >= window ? pos - window + 1 : 0, pos}; }

// Pages of one chunk for a layer and KV head; pages outside [first, last] stay NULL and are never read.
void set_pages(const Worker &w, const Step &s, int seq, int kv_head, int chunk, int first, int last, AttendChunk &c) {
  for (int i = 0; i < 4; i++) {
    const int pos = chunk * TL_KEY_CHUNK + i * TL_PAGE_POSITIONS;
    const bool seen = pos + TL_PAGE_POSITIONS > first && pos <= last;
    uint8_t *page = seen ? page_at(w, seq, s.stage, s.phase->part, pos) : nullptr;
    c.k_page[i] = seen ? k_of(w, page, s.phase->layer, kv_head) : nullptr;
    c.v_page[i] = seen ? v_of(w, page, s.phase->layer, kv_head) : nullptr;
  }
}

AttendChunk chunk_of(const Worker &w) {
  AttendChunk c = {};
  c.kv_dtype = w.plan.desc.kv_dtype;
  c.head_dim = w.plan.desc.head_dim;
  c.scale = 1.0f / __builtin_sqrtf((float)c.head_dim);
  return c;
}

int state_floats(const Worker &w) { return kStateHead + w.plan.head_pad; }

// The running result of one query: the current group of chunks, and the groups before it.
struct Accumulator {
  float *group, *total;
  bool has_group = false, has_total = false;

  void close_group(Worker &w) {
    if (!has_group) return;
    absorb(w, group, total, has_total);
    has_group = false;
  }
  void add(Worker &w, const float *state) { absorb(w, state, group, has_group); }

 private:
  static void absorb(Worker &w, const float *state, float *into, bool &has) {
    if (has)
      w.k.merge_state(w.plan.head_pad, state, into);
    else
      memcpy(into, state, state_floats(w) * sizeof(float));
    has = true;
  }
};

// ---- many rows: a block of consecutive rows and the heads of one KV head

struct BlockQuery {
  int row, head;
  Keys keys;
  Accumulator acc;
};

void attend_tile(Worker &w, const Step &s, const RowBlock &b, int kv_head, int chunk, BlockQuery *q, int n, float *states) {
  AttendChunk c = chunk_of(w);
  int first = q[0].keys.first, last = 0;
  const int base = chunk * TL_KEY_CHUNK;
  for (int i = 0; i < n; i++) {
    c.q[i] = w.q(q[i].row) + (int64_t)q[i].head * w.plan.head_pad;
    c.lo[i] = std::max(0, q[i].keys.first - base);
    c.hi[i] = std::min(TL_KEY_CHUNK, q[i].keys.last + 1 - base);
    c.state[i] = states + i * state_floats(w);
    first = std::min(first, q[i].keys.first);
    last = std::max(last, q[i].keys.last);
  }
  c.n_queries = n;
  set_pages(w, s, w.batch.seq[b.begin], kv_head, chunk, first, last, c);
  w.k.attend_chunk(&c);
  for (int i = 0; i < n; i++)
    if (c.lo[i] < c.hi[i]) q[i].acc.add(w, c.state[i]);
}

void attend_block(Worker &w, const Step &s, const RowBlock &b, int kv_head, int window) {
  const int group = w.plan.group, size = state_floats(w), n = b.n_rows * group;
  float *memory = (float *)(w.memory + w.plan.scratch.t_states);
  BlockQuery q[kBlockQueries];
  for (int first = 0; first < n; first += kBlockQueries) {  // one pass but for groups wider than a block
    const int count = std::min(kBlockQueries, n - first);
    for (int i = 0; i < count; i++) {
      const int row = b.begin + (first + i) / group;
      q[i] = {row, kv_head * group + (first + i) % group, keys_of(w.batch.pos[row], window), {memory + 2 * i * size, memory + (2 * i + 1) * size}};
    }
    float *states = memory + 2 * kBlockQueries * size;
    for (int chunk = q[0].keys.first / TL_KEY_CHUNK; chunk <= q[count - 1].keys.last / TL_KEY_CHUNK; chunk++) {
      if (chunk % TL_CHUNK_GROUP == 0)
        for (int i = 0; i < count; i++) q[i].acc.close_group(w);
      for (int i = 0; i < count; i += kMaxQueries) {
        const int last = std::min(i + kMaxQueries, count);
        const int base = chunk * TL_KEY_CHUNK;
        if (q[last - 1].keys.last < base || q[i].keys.first >= base + TL_KEY_CHUNK) continue;
        attend_tile(w, s, b, kv_head, chunk, q + i, last - i, states);
      }
    }
    for (int i = 0; i < count; i++) {
      q[i].acc.close_group(w);
      w.k.finish_state(w.plan.desc.head_dim, q[i].acc.total, w.attn(q[i].row) + (int64_t)q[i].head * w.plan.desc.head_dim);
    }
  }
}

// ---- few rows: chunks of one row's keys are shared out

float *partial(const Worker &w, int row, int head, int chunk) {
  const int64_t at = ((int64_t)row * w.plan.desc.n_heads + head) * w.plan.max_chunks() + chunk;
  return w.plan.buffer(w.plan.scratch.partials) + at * state_floats(w);
}

void attend_span(Worker &w, const Step &s, int row, int kv_head, const Keys &keys, int begin, int end) {
  const int group = w.plan.group;
  AttendChunk c = chunk_of(w);
  for (int chunk = begin; chunk < end; chunk++) {
    const int base = chunk * TL_KEY_CHUNK;
    set_pages(w, s, w.batch.seq[row], kv_head, chunk, keys.first, keys.last, c);
    for (int first = 0; first < group; first += kMaxQueries) {
      c.n_queries = std::min(kMaxQueries, group - first);
      for (int i = 0; i < c.n_queries; i++) {
        const int head = kv_head * group + first + i;
        c.q[i] = w.q(row) + (int64_t)head * w.plan.head_pad;
        c.lo[i] = std::max(0, keys.first - base);
        c.hi[i] = std::min(TL_KEY_CHUNK, keys.last + 1 - base);
        c.state[i] = partial(w, row, head, chunk);
      }
      w.k.attend_chunk(&c);
    }
  }
}

void merge_chunks(Worker &w, int row, int head, int begin, int end) {
  float *memory = (float *)(w.memory + w.plan.scratch.t_states);
  Accumulator acc{memory, memory + state_floats(w)};
  for (int chunk = begin; chunk < end; chunk++) {
    if (chunk % TL_CHUNK_GROUP == 0) acc.close_group(w);
    acc.add(w, partial(w, row, head, chunk));
  }
  acc.close_group(w);
  w.k.finish_state(w.plan.desc.head_dim, acc.total, w.attn(row) + (int64_t)head * w.plan.desc.head_dim);
}

void attend_split(Worker &w, const Step &s, int window) {
  const int n_kv = w.plan.desc.n_kv_heads, n_rows = w.batch.n_rows;
  Keys keys[kSplitRows];
  int begin[kSplitRows], end[kSplitRows], n_spans[kSplitRows], n_units = 0;
  for (int row = 0; row < n_rows; row++) {
    keys[row] = keys_of(w.batch.pos[row], window);
    begin[row] = keys[row].first / TL_KEY_CHUNK;
    end[row] = keys[row].last / TL_KEY_CHUNK + 1;
    n_spans[row] = (end[row] - begin[row] + kSplitChunks - 1) / kSplitChunks;
    n_units += n_spans[row] * n_kv;
  }
  w.share(n_units, [&](int unit) {
    int row = 0;
    while (unit >= n_spans[row] * n_kv) unit -= n_spans[row++] * n_kv;
    const int kv_head = unit % n_kv, first = begin[row] + unit / n_kv * kSplitChunks;
    attend_span(w, s, row, kv_head, keys[row], first, std::min(first + kSplitChunks, end[row]));
    std::atomic<int> &done = w.plan.split_done[row * n_kv + kv_head];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < n_spans[row]) return;
    done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < w.plan.group; i++) merge_chunks(w, row, kv_head * w.plan.group + i, begin[row], end[row]);
  });
}

}  // namespace

void run_attend(Worker &w, const Step &s) {
  const int window = merged_window(w, *s.phase), n_kv = w.plan.desc.n_kv_heads;
  if (w.batch.n_rows <= kSplitRows) return attend_split(w, s, window);
  const std::vector<RowBlock> &blocks = w.run.blocks;
  const int n_blocks = (int)blocks.size();
  // Later rows read more keys: they go first, so that the threads finish together.
  w.share(n_blocks * n_kv, [&](int unit) { attend_block(w, s, blocks[n_blocks - 1 - unit / n_kv], unit % n_kv, window); });
}

}  // namespace tl
