// From the parts of a step to its tasks (step_task.cuh): which rows go from task to task as flagged words, and which tasks are kept once for
// all loops.
#pragma once

#include <string.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "step.cuh"
#include "step_product.cuh"

namespace tl {

// The channel of each row that a task of the step leaves and a later one reads; written: by which task last.
class Channels {
 public:
  Channels(const std::vector<StepPart> &parts, uint8_t *words, uint64_t nbytes) : words_(words), nbytes_(nbytes) {
    for (const StepPart &part : parts) {
      if (part.attends) {
        read_.insert(part.attend.place.qkv);
        continue;
      }
      const GemvArgs &g = part.gemv;
      for (int o = 0; o < g.program.n_ops; o++)
        if (g.program.op[o].kind != kRowStore && g.program.op[o].p) read_.insert(g.program.op[o].p);
      if (!g.program.n_ops) read_.insert(g.source.data);
      if (g.epilogue.kind == kAddToRows) read_.insert(g.epilogue.addend);
    }
  }
  Channel from(const void *p, int task) const {
    const auto found = written_.find(p);
    return found == written_.end() ? kMemory : Channel{words_ + index_.at(p) * nbytes_, task - found->second};
  }
  Channel to(const void *p, int task) {
    if (!read_.count(p)) return kMemory;
    if (!index_.count(p) && (int)index_.size() < kMaxChannels) index_.emplace(p, (int)index_.size());
    if (!index_.count(p)) {
      full_ = true;
      return kMemory;
    }
    written_[p] = task;
    return {words_ + index_[p] * nbytes_, 0};
  }
  bool full() const { return full_; }

 private:
  uint8_t *const words_;  // of the first channel
  const uint64_t nbytes_;
  std::set<const void *> read_;
  std::map<const void *, int> index_, written_;
  bool full_ = false;
};

// The row program, and where its rows come from. A row that is added may be read early where the task before did not leave it.
inline void put_program(StepProduct &p, const RowProgram &program, int n, Channels &channels) {
  ProductHead &h = p.head;
  h.dim = program.dim;
  h.n_ops = program.n_ops;
  h.row = channels.from(program.op[0].p, n);
  p.source = program.op[0].p;
  p.eps = program.eps;
  p.tail = program.tail;
  for (int o = 1; o < program.n_ops; o++) {
    const RowOp &op = program.op[o];
    p.op[o] = {op.p, op.kind, kMemory};
    if (op.kind == kRowNorm && o == program.n_ops - 1) {
      p.last_norm = op.p;
      break;
    }
    h.kinds |= (uint32_t)op.kind << kKindBits * (o - 1);
    if (op.kind == kRowNorm && !p.first_norm) p.first_norm = op.p;
    if (op.kind == kRowLoad || op.kind == kRowAdd) p.op[o].channel = channels.from(op.p, n);
    if (op.kind == kRowAdd && !h.early && (!p.op[o].channel.words || p.op[o].channel.back > 1)) h.early = o;
  }
}

// How many CTAs a task keeps to its end, and the first one behind them.
struct Kept {
  int next, n;
};

// Whoever ends a task is late for the next one: what it has to set up takes longer than words do. So a product begins with the CTA behind those
// that the task before kept, and is left to the others where they are enough: where none of their warps has more than one item, or two, which it
// multiplies side by side, if many would be late.
constexpr int kManyOf = 5;  // of so many CTAs one
inline void place_product(ProductHead &h, int n_units, int n_ctas, Kept &kept) {
  const int n_free = n_ctas - kept.n;
  const auto enough = [&](int items) {  // CTAs for so many items a warp
    const int each = std::max(1, items * kWarps / (h.unit_panels * h.n_items));
    return (n_units + each - 1) / each;
  };
  h.first_cta = kept.next;
  h.n_ctas = std::min(n_units, n_ctas);
  if (enough(1) <= n_free)
    h.n_ctas = enough(1);
  else if (h.dtype != TL_INT8 && kept.n * kManyOf >= n_ctas && enough(2) <= n_free)
    h.n_ctas = std::min(n_units, n_free);
  h.units_each = n_units / h.n_ctas;
  h.units_more = n_units % h.n_ctas;
  kept = {(h.first_cta + h.n_ctas) % n_ctas, h.n_ctas};
}

inline StepTask product_of(const GemvArgs &g, int n, int n_ctas, Kept &kept, Channels &channels) {
  StepTask task;
  memset((void *)&task, 0, sizeof task);  // compared byte by byte
  StepProduct &p = task.product;
  ProductHead &h = p.head;
  const int n_units = g.weight.n_out / kPanelRows / g.unit_panels;
  h.unit_panels = g.unit_panels;
  h.n_blocks = pad16(g.weight.n_in) / 16;
  h.n_chunks = (h.n_blocks * 16 + TL_K_CHUNK - 1) / TL_K_CHUNK;
  p.item_chunks = g.weight.dtype == TL_INT8 ? 2 : 1;
  h.n_items = (h.n_chunks + p.item_chunks - 1) / p.item_chunks;
  h.items_inverse = inverse_of(h.n_items);
  h.dtype = g.weight.dtype;
  place_product(h, n_units, n_ctas, kept);
  h.round_panels = std::min(h.units_each + (h.units_more > 0), kRoundUnits) * g.unit_panels;
  h.groups = g.weight.dtype == TL_INT8 && g.weight.group_size;
  h.kind = g.epilogue.kind;
  h.act = g.epilogue.act;
  h.out_dtype = g.epilogue.operand.dtype;
  p.weight = g.weight;
  p.bias = g.bias;
  p.epilogue = g.epilogue;
  // What it reads, before what it writes: a program may read the row that the product's outputs replace.
  if (g.program.n_ops) {
    put_program(p, g.program, n, channels);
  } else {
    h.row = channels.from(g.source.data, n);
    p.source = g.source.data;
  }
  h.addend = g.epilogue.kind == kAddToRows ? channels.from(g.epilogue.addend, n) : kMemory;
  for (int o = 0; o < g.program.n_ops; o++)
    if (g.program.op[o].kind == kRowStore) p.op[o].channel = channels.to(g.program.op[o].p, n);
  h.out = g.epilogue.kind == kActivate ? g.epilogue.operand.data : g.epilogue.out;
  h.words = channels.to(h.out, n).words;
  return task;
}

inline StepTask attention_of(const AttendArgs &a, int n, Channels &channels) {
  StepTask task;
  memset((void *)&task, 0, sizeof task);
  task.attends = 1;
  StepAttention &t = task.attention;
  t.attend = a;
  Rows &rows = t.attend.place.rows;  // put in where it runs: rows share tasks
  rows.pos = rows.seq = nullptr;
  rows.page_table = nullptr;
  const PlaceArgs &p = a.place;
  t.head = {channels.from(p.qkv, n),
            channels.to(a.out.data, n).words,
            a.out.data,
            a.window,
            a.scale,
            p.eps,
            p.qk_norm,
            p.rotary_dim,
            p.interleaved,
            a.out.dtype};
  return task;
}

// Whether two tasks are the same, but for by how many stages the second one's K and V lie behind the first one's.
inline bool same_but_stage(StepTask a, StepTask b, int n_stages) {
  if (a.attends && b.attends) {
    if (b.attention.attend.place.rows.stage - a.attention.attend.place.rows.stage != n_stages) return false;
    a.attention.attend.place.rows.stage = b.attention.attend.place.rows.stage = 0;
  }
  return !memcmp(&a, &b, sizeof a);
}

struct Program {
  std::vector<StepTask> tasks;
  StepOrder order;
};

// The tasks. Loops after the first that are the one before again, or the one before that (rows take turns between two places), are kept
// once. `loops`: where in the parts each core loop begins and the last one ends; `n_mergers`: CTAs, the first ones, that end an attention. None
// where too many rows go from task to task.
inline Program program_of(const std::vector<StepPart> &parts, const std::vector<int> &loops, int n_ctas, int n_mergers, Channels channels) {
  Program p;
  Kept kept = {0, 0};
  for (const StepPart &part : parts) {
    const int n = (int)p.tasks.size();
    p.tasks.push_back(part.attends ? attention_of(part.attend, n, channels) : product_of(part.gemv, n, n_ctas, kept, channels));
    if (part.attends) kept = {n_mergers % n_ctas, n_mergers};
  }
  if (channels.full()) return {};
  p.order = {(int32_t)p.tasks.size(), 0, 1, 0, 0};
  const int n_loops = std::max(0, (int)loops.size() - 1);
  for (int period = 1; period <= 2 && n_loops > 2 * period; period++) {
    const int first = loops[1], n = loops[1 + period] - first;
    int n_rounds = 1;
    for (int loop = 1 + period; loop + period <= n_loops; loop += period, n_rounds++) {
      bool same = loops[loop + period] - loops[loop] == n;
      for (int i = 0; i < n && same; i++) same = same_but_stage(p.tasks[first + i], p.tasks[loops[loop] + i], loop - 1);
      if (!same) break;
    }
    if (n_rounds == 1) continue;
    p.order = {first, n, n_rounds, 0, period};
    p.tasks.erase(p.tasks.begin() + first + n, p.tasks.begin() + first + n * n_rounds);
    break;
  }
  p.order.n_tasks = (int32_t)p.tasks.size();
  return p;
}

}  // namespace tl
