// Attention over the pages of each row's sequence, in chunks of 64 keys at absolute positions.
//
// A query's chunks merge in ascending order inside groups of TL_CHUNK_GROUP, then the groups in ascending order, whoever
// computed them: with many rows one thread takes a block of queries through all chunks, with few rows threads share a
// query's chunks and leave the states in scratch, where they are merged afterwards.
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

// Keys and values of one chunk for a layer and KV head, page by page; pages outside [first, last] stay NULL and are never read.
void set_pages(const Worker &w, const Step &s, int seq, int kv_head, int chunk, const Keys &keys, const void **block) {
  for (int i = 0; i < 4; i++) {
    const int pos = chunk * TL_KEY_CHUNK + i * TL_PAGE_POSITIONS;
    const bool seen = pos + TL_PAGE_POSITIONS > keys.first && pos <= keys.last;
    block[i] = seen ? block_of(w, page_at(w, seq, s.stage, s.phase->part, pos), s.phase->layer, kv_head) : nullptr;
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

// The merged state of a head becomes its part of the attention output.
void finish_head(Worker &w, const float *state, int head, float *out) {
  const int n = w.plan.desc.head_dim;
  w.k.finish_state(n, state, out + (int64_t)head * n);
  if (w.plan.rotation > 1) w.k.rotate(n, w.plan.rotation, out + (int64_t)head * n);
}

// ---- many rows: a block of consecutive rows and the heads of one KV head

struct BlockQuery {
  int row, head;
  Keys keys;
  Accumulator acc;
};

void attend_tile(Worker &w, int chunk, BlockQuery *q, int n, float *states, AttendChunk &c) {
  const int base = chunk * TL_KEY_CHUNK;
  for (int i = 0; i < n; i++) {
    c.q[i] = w.q(q[i].row) + (int64_t)q[i].head * w.plan.head_pad;
    c.lo[i] = std::max(0, q[i].keys.first - base);
    c.hi[i] = std::min(TL_KEY_CHUNK, q[i].keys.last + 1 - base);
    c.state[i] = states + i * state_floats(w);
  }
  c.n_queries = n;
  w.k.attend_chunk(&c);
  c.next[0] = nullptr;  // brought near once
  for (int i = 0; i < n; i++)
    if (c.lo[i] < c.hi[i]) q[i].acc.add(w, c.state[i]);
}

// All chunks of some queries that share a sequence and a KV head; q is in ascending order of rows.
void attend_queries(Worker &w, const Step &s, int seq, int kv_head, BlockQuery *q, int n, float *states) {
  const Keys keys{q[0].keys.first, q[n - 1].keys.last};
  const int last_chunk = keys.last / TL_KEY_CHUNK;
  AttendChunk c = chunk_of(w);
  for (int chunk = keys.first / TL_KEY_CHUNK; chunk <= last_chunk; chunk++) {
    const int base = chunk * TL_KEY_CHUNK;
    if (chunk % TL_CHUNK_GROUP == 0)
      for (int i = 0; i < n; i++) q[i].acc.close_group(w);
    set_pages(w, s, seq, kv_head, chunk, keys, c.block);
    set_pages(w, s, seq, kv_head, chunk + 1, keys, c.next);
    for (int i = 0; i < n; i += kMaxQueries) {
      const int last = std::min(i + kMaxQueries, n);
      if (q[last - 1].keys.last >= base && q[i].keys.first < base + TL_KEY_CHUNK) attend_tile(w, chunk, q + i, last - i, states, c);
    }
  }
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
    attend_queries(w, s, w.batch.seq[b.begin], kv_head, q, count, memory + 2 * kBlockQueries * size);
    for (int i = 0; i < count; i++) {
      q[i].acc.close_group(w);
      finish_head(w, q[i].acc.total, q[i].head, w.attn(q[i].row));
    }
  }
}

// ---- few rows: chunks of one row's keys are shared out

float *partial(const Worker &w, int row, int head, int chunk) {
  const int64_t at = ((int64_t)row * w.plan.desc.n_heads + head) * w.plan.max_chunks() + chunk;
  return w.plan.buffer(w.plan.scratch.partials) + at * state_floats(w);
}

// One chunk of a row's keys, for the KV heads begin <= head < end: the heads of a page lie side by side.
void attend_row_chunk(Worker &w, const Step &s, int row, const Keys &keys, int chunk, int begin, int end) {
  const int group = w.plan.group, base = chunk * TL_KEY_CHUNK, seq = w.batch.seq[row];
  AttendChunk c = chunk_of(w);
  for (int kv_head = begin; kv_head < end; kv_head++) {
    set_pages(w, s, seq, kv_head, chunk, keys, c.block);
    const bool more = kv_head + 1 < end;
    set_pages(w, s, seq, more ? kv_head + 1 : begin, more ? chunk : chunk + 1, keys, c.next);
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
      c.next[0] = nullptr;
    }
  }
}

struct ChunkRange {
  int begin, end;
  int n() const { return end - begin; }
};

ChunkRange chunks_of(const Worker &w, int row, int window) {
  const Keys keys = keys_of(w.batch.pos[row], window);
  return {keys.first / TL_KEY_CHUNK, keys.last / TL_KEY_CHUNK + 1};
}

void merge_head(Worker &w, int row, int head, const ChunkRange &chunks, float *out) {
  float *memory = (float *)(w.memory + w.plan.scratch.t_states);
  Accumulator acc{memory, memory + state_floats(w)};
  for (int chunk = chunks.begin; chunk < chunks.end; chunk++) {
    if (chunk % TL_CHUNK_GROUP == 0) acc.close_group(w);
    acc.add(w, partial(w, row, head, chunk));
  }
  acc.close_group(w);
  finish_head(w, acc.total, head, out);
}

void attend_split(Worker &w, const Step &s, int window) {
  const int n_rows = w.batch.n_rows, n_kv = w.plan.desc.n_kv_heads, n_heads = w.plan.desc.n_heads;
  ChunkRange chunks[kSplitRows];
  int n_spans[kSplitRows], all_spans = 0;
  for (int row = 0; row < n_rows; row++) {
    chunks[row] = chunks_of(w, row, window);
    n_spans[row] = (chunks[row].n() + kSplitChunks - 1) / kSplitChunks;
    all_spans += n_spans[row];
  }
  // Where the keys are few, heads are shared out too.
  const int n_parts = std::clamp(2 * w.pool.size() / all_spans, 1, n_kv);
  w.share(all_spans * n_parts, [&](int unit) {
    const int part = unit % n_parts, first_head = n_kv * part / n_parts, last_head = n_kv * (part + 1) / n_parts;
    int row = 0, span = unit / n_parts;
    while (span >= n_spans[row]) span -= n_spans[row++];
    const int first = chunks[row].begin + span * kSplitChunks, last = std::min(first + kSplitChunks, chunks[row].end);
    for (int chunk = first; chunk < last; chunk++) attend_row_chunk(w, s, row, keys_of(w.batch.pos[row], window), chunk, first_head, last_head);
  });
  if (merges_late(w, s)) return;
  w.share(n_rows * n_heads, [&](int unit) { merge_head(w, unit / n_heads, unit % n_heads, chunks[unit / n_heads], w.attn(unit / n_heads)); });
}

}  // namespace

bool merges_late(const Worker &w, const Step &attend) {
  if (w.batch.n_rows > kSplitRows || w.owns_heads) return false;
  const int window = merged_window(w, *attend.phase);
  for (int row = 0; row < w.batch.n_rows; row++)
    if (chunks_of(w, row, window).n() > kFewChunks) return false;
  return true;
}

void merge_row(Worker &w, const Step &attend, int row, float *out) {
  const ChunkRange chunks = chunks_of(w, row, merged_window(w, *attend.phase));
  for (int head = 0; head < w.plan.desc.n_heads; head++) merge_head(w, row, head, chunks, out);
}

void attend_heads(Worker &w, const Step &s, int begin, int end) {
  const int window = merged_window(w, *s.phase), group = w.plan.group;
  for (int row = 0; row < w.batch.n_rows; row++) {
    const ChunkRange chunks = chunks_of(w, row, window);
    for (int chunk = chunks.begin; chunk < chunks.end; chunk++) attend_row_chunk(w, s, row, keys_of(w.batch.pos[row], window), chunk, begin, end);
    for (int head = begin * group; head < end * group; head++) merge_head(w, row, head, chunks, w.attn(row));
  }
}

void run_attend(Worker &w, const Step &s) {
  const int window = merged_window(w, *s.phase), n_kv = w.plan.desc.n_kv_heads;
  if (w.batch.n_rows <= kSplitRows) return attend_split(w, s, window);
  const std::vector<RowBlock> &blocks = w.run.blocks;
  const int n_blocks = (int)blocks.size();
  // Later rows read more keys: every thread's range mixes early and late ones.
  w.share(
      n_blocks * n_kv,
      [&](int unit) {
        const int i = unit / n_kv, block = i % 2 ? n_blocks - 1 - i / 2 : i / 2;
        attend_block(w, s, blocks[block], unit % n_kv, window);
      },
      true);
}

}  // namespace tl
