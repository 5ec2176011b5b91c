// The phases around a matrix product: lay out the operand, share out the panels, hand each tile of outputs on.
#include <string.h>

#include <algorithm>

#include "run.h"
#include "sampling.h"

namespace tl {
namespace {

// Where the operand rows come from.
struct Source {
  const float *base;
  int64_t stride;
  const float *norm = nullptr;     // (n_in,) RMSNorm weights applied on the way
  const int32_t *rows = nullptr;   // row i is rows[i] of base
  const float *second = nullptr;   // appended to each row, same stride: [base; second]
  const Step *attend = nullptr;    // rows are attention outputs still to be merged
  const Step *kept = nullptr;      // the rows' operands go to their pages, or in a rebuild come from there
  int first_panel = 0;             // outputs before it are not wanted
};

// Outputs of some rows and panels: row r of the tile is at out + r * stride.
struct Tile {
  int row, n_rows, panel, n_panels;
  float *out;
  int stride;
  float *row_out(int r) const { return out + (int64_t)r * stride; }
  int n_outputs() const { return n_panels * kPanelRows; }
  int first_output() const { return panel * kPanelRows; }
};

// Where the operand of a QKV step's row lies beyond the batch.
uint8_t *operand_at(const Worker &w, const Step &s, int row) {
  const int part = s.phase->part, pos = w.batch.pos[row];
  const int64_t page = w.batch.operand_table[w.batch.seq[row]][(int64_t)s.stage * w.plan.desc.table_stride + pos / TL_PAGE_POSITIONS];
  const uint64_t slot = pos % TL_PAGE_POSITIONS * operand_row_nbytes(s.phase->weight.dtype, s.phase->weight.n_in);
  return (uint8_t *)w.plan.desc.operand_base[part] + page * w.plan.operand_page_nbytes[part] + w.plan.operand_offset[s.phase - w.plan.phases.data()] +
         slot;
}

bool is_rebuild(const Worker &w) { return w.batch.sections & TL_RUN_REBUILD; }

void write_operand_row(Worker &w, const tl_matrix &m, const Source &s, int row, void *block, int block_rows, int at, bool keep) {
  if (s.kept && is_rebuild(w)) return w.k.load_operand(m.dtype, m.n_in, operand_at(w, *s.kept, row), w.row_buffer(0), block, block_rows, at);
  const float *x = s.base + (s.rows ? s.rows[row] : row) * s.stride;
  if (s.norm) {
    w.k.rms_norm(m.n_in, w.plan.desc.norm_eps, x, s.norm, w.row_buffer(0));
    x = w.row_buffer(0);
  } else if (s.attend) {
    merge_row(w, *s.attend, row, w.row_buffer(0));
    x = w.row_buffer(0);
  } else if (s.second) {
    memcpy(w.row_buffer(0), x, m.n_in / 2 * sizeof(float));
    memcpy(w.row_buffer(0) + m.n_in / 2, s.second + row * s.stride, m.n_in / 2 * sizeof(float));
    x = w.row_buffer(0);
  }
  w.k.write_block_row(m.dtype, m.n_in, x, block, block_rows, at);
  if (s.kept && keep) w.k.store_operand(m.dtype, m.n_in, x, operand_at(w, *s.kept, row));
}

// Panels of one unit: several units a thread where there are enough panels to keep a kernel busy, in groups of `align`.
int panels_of_unit(const Worker &w, int n_panels, int align) {
  const int n_threads = w.pool.size(), units = n_threads * std::clamp(n_panels / (n_threads * kBusyPanels), 1, kMaxUnits);
  const int each = ((n_panels + units - 1) / units + align - 1) / align * align;
  return std::max(align, std::min(each, kPrivatePanels / align * align));
}

// Few rows: each thread lays out the operand for itself.
template <class Use>
void multiply_private(Worker &w, const tl_matrix &m, const Source &s, int n_rows, int align, Use use) {
  void *block = w.memory + w.plan.scratch.t_operand;
  for (int r = 0; r < n_rows; r++) write_operand_row(w, m, s, r, block, n_rows, r, w.thread == 0);
  const int last_panel = m.n_out / kPanelRows, n_panels = last_panel - s.first_panel, panels = panels_of_unit(w, n_panels, align);
  float *out = (float *)(w.memory + w.plan.scratch.t_tile);
  w.share((n_panels + panels - 1) / panels,
          [&](int unit) {
            const int panel = s.first_panel + unit * panels, n = std::min(panels, last_panel - panel);
            w.k.matmul(&m, panel, n, block, n_rows, out, n * kPanelRows);
            use(Tile{0, n_rows, panel, n, out, n * kPanelRows});
          },
          w.plan.from_memory);
}

// Many rows: the operand is laid out once, in blocks of equal height; a unit is some panels against some blocks.
template <class Use>
void multiply_shared(Worker &w, const tl_matrix &m, const Source &s, int n_rows, int align, Use use) {
  const int most_rows = w.k.block_rows(m.dtype), n_blocks = (n_rows + most_rows - 1) / most_rows;
  const int block_rows = (n_rows + n_blocks - 1) / n_blocks;
  const uint64_t block_nbytes = w.k.block_nbytes(m.dtype, m.n_in, block_rows);
  uint8_t *operand = w.plan.memory + w.plan.scratch.operand;
  const auto rows_of = [&](int block) { return std::min(block_rows, n_rows - block * block_rows); };
  w.share(n_rows, [&](int row) {
    const int block = row / block_rows;
    write_operand_row(w, m, s, row, operand + block * block_nbytes, rows_of(block), row % block_rows, true);
  });
  const int last_panel = m.n_out / kPanelRows, panels = std::max(align, kUnitPanels / align * align);
  const int n_panel_units = (last_panel - s.first_panel + panels - 1) / panels;
  const int blocks = std::max(1, kUnitRows / block_rows), n_row_units = (n_blocks + blocks - 1) / blocks;
  w.share(
      n_panel_units * n_row_units,
      [&](int unit) {
        const int panel = s.first_panel + unit / n_row_units * panels, first = unit % n_row_units * blocks, last = std::min(first + blocks, n_blocks);
        float *out = (float *)(w.memory + w.plan.scratch.t_tile);
        Tile t{first * block_rows, 0, panel, std::min(panels, last_panel - panel), out, panels * kPanelRows};
        for (int b = first; b < last; b++) {
          w.k.matmul(&m, panel, t.n_panels, operand + b * block_nbytes, rows_of(b), t.row_out(t.n_rows), t.stride);
          t.n_rows += rows_of(b);
        }
        use(t);
      },
      true);
}

// Every tile of W a goes to use(tile), which may write anything but the source; panels stay together in groups of `align`.
template <class Use>
void multiply(Worker &w, const tl_matrix &m, const Source &s, int n_rows, int align, Use use) {
  if (n_rows <= kPrivateRows)
    multiply_private(w, m, s, n_rows, align, use);
  else
    multiply_shared(w, m, s, n_rows, align, use);
}

void add_bias(Worker &w, const Tile &t, const float *bias) {
  if (!bias) return;
  for (int r = 0; r < t.n_rows; r++) w.k.add(t.n_outputs(), t.row_out(r), bias + t.first_output(), t.row_out(r));
}

// W a + bias goes to rows that are dim_pad apart.
void multiply_to(Worker &w, const tl_phase &p, const Source &source, float *to) {
  multiply(w, p.weight, source, w.batch.n_rows, 1, [&](const Tile &t) {
    add_bias(w, t, p.bias);
    for (int r = 0; r < t.n_rows; r++)
      memcpy(to + (int64_t)(t.row + r) * w.plan.dim_pad + t.first_output(), t.row_out(r), t.n_outputs() * sizeof(float));
  });
}

// ---- q, k, v

// One head of one row, after the product: norm, rope, rounding, and to where attention reads it.
void place_head(Worker &w, const Step &s, int row, int head, float *v) {
  const tl_plan_desc &d = w.plan.desc;
  const int n_qk = d.n_heads + d.n_kv_heads, pos = w.batch.pos[row];
  if (head < n_qk && (s.phase->flags & TL_PHASE_ROPE)) {
    const int64_t at = (int64_t)pos * (d.rotary_dim / 2);
    w.k.rope(d.head_dim, d.rotary_dim, d.rope_interleaved, d.rope_cos + at, d.rope_sin + at, v);
  }
  if (w.plan.rotation > 1) w.k.rotate(d.head_dim, w.plan.rotation, v);
  if (head < d.n_heads) {
    float *q = w.q(row) + (int64_t)head * w.plan.head_pad;
    memcpy(q, v, w.plan.head_pad * sizeof(float));
    w.k.prepare_q(d.kv_dtype, d.head_dim, q);
    return;
  }
  uint8_t *page = page_at(w, w.batch.seq[row], s.stage, s.phase->part, pos);
  const int slot = pos % TL_PAGE_POSITIONS, layer = s.phase->layer;
  const int n_clamped = head < n_qk ? w.k.store_k(d.kv_dtype, d.head_dim, v, block_of(w, page, layer, head - d.n_heads), slot)
                                    : w.k.store_v(d.kv_dtype, d.head_dim, v, block_of(w, page, layer, head - n_qk), slot);
  if (!is_rebuild(w)) w.n_clamped += n_clamped;  // counted when they first came up
}

// RMSNorm over all heads of q, or of k, of one row; heads are head_pad apart.
void norm_full(Worker &w, float *heads, int n_heads, const float *weight) {
  const int hd = w.plan.desc.head_dim, pad = w.plan.head_pad;
  float *flat = w.row_buffer(0);
  for (int h = 0; h < n_heads; h++) memcpy(flat + h * hd, heads + h * pad, hd * sizeof(float));
  w.k.rms_norm(n_heads * hd, w.plan.desc.norm_eps, flat, weight, flat);
  for (int h = 0; h < n_heads; h++) memcpy(heads + h * pad, flat + h * hd, hd * sizeof(float));
}

Source qkv_source(const Worker &w, const Step &s) {
  Source source{w.x(0), w.plan.dim_pad, s.phase->norm};
  if (w.batch.operand_table) source.kept = &s;
  return source;
}

// The heads of a tile, after the product.
void place_heads(Worker &w, const Step &s, const Tile &t) {
  const tl_plan_desc &d = w.plan.desc;
  const tl_phase &p = *s.phase;
  const int head_panels = w.plan.head_pad / kPanelRows;
  add_bias(w, t, p.bias);
  for (int i = 0; i < t.n_panels / head_panels; i++) {
    const int head = t.panel / head_panels + i;
    const float *norm = d.qk_norm == TL_QK_NORM_NONE || head >= d.n_heads + d.n_kv_heads ? nullptr : head < d.n_heads ? p.q_norm : p.k_norm;
    for (int r = 0; r < t.n_rows; r++) {
      float *v = t.row_out(r) + i * w.plan.head_pad;
      if (norm) w.k.rms_norm(d.head_dim, d.norm_eps, v, norm, v);
      place_head(w, s, t.row + r, head, v);
    }
  }
}

void run_qkv_full_norm(Worker &w, const Step &s, const Source &source, int first_head) {
  const tl_plan_desc &d = w.plan.desc;
  const int n_heads = d.n_heads + 2 * d.n_kv_heads, pad = w.plan.head_pad;
  float *qkv = w.plan.buffer(w.plan.scratch.qkv);
  const int64_t stride = (int64_t)n_heads * pad;
  multiply(w, s.phase->weight, source, w.batch.n_rows, pad / kPanelRows, [&](const Tile &t) {
    add_bias(w, t, s.phase->bias);
    for (int r = 0; r < t.n_rows; r++) memcpy(qkv + (t.row + r) * stride + t.first_output(), t.row_out(r), t.n_outputs() * sizeof(float));
  });
  w.share(w.batch.n_rows, [&](int row) {
    float *heads = qkv + row * stride;
    if (first_head == 0) norm_full(w, heads, d.n_heads, s.phase->q_norm);
    norm_full(w, heads + (int64_t)d.n_heads * pad, d.n_kv_heads, s.phase->k_norm);
    for (int h = first_head; h < n_heads; h++) place_head(w, s, row, h, heads + (int64_t)h * pad);
  });
}

}  // namespace

void run_qkv(Worker &w, const Step &s) {
  const int head_panels = w.plan.head_pad / kPanelRows, first_head = is_rebuild(w) ? w.plan.desc.n_heads : 0;  // q is not wanted then
  Source source = qkv_source(w, s);
  source.first_panel = first_head * head_panels;
  if (w.plan.desc.qk_norm == TL_QK_NORM_FULL) return run_qkv_full_norm(w, s, source, first_head);
  multiply(w, s.phase->weight, source, w.batch.n_rows, head_panels, [&](const Tile &t) { place_heads(w, s, t); });
}

void run_qkv_attend(Worker &w, const Step &qkv, const Step &attend) {
  const tl_plan_desc &d = w.plan.desc;
  const tl_matrix &m = qkv.phase->weight;
  const int begin = w.pool.first_of(w.thread, d.n_kv_heads), end = w.pool.first_of(w.thread + 1, d.n_kv_heads), n_rows = w.batch.n_rows;
  const Source source = qkv_source(w, qkv);
  void *block = w.own(w.plan.scratch.t_operand);
  for (int r = 0; r < n_rows; r++) write_operand_row(w, m, source, r, block, n_rows, r, w.thread == 0);
  const int head_panels = w.plan.head_pad / kPanelRows, most = std::max(1, kPrivatePanels / head_panels);
  const auto multiply_heads = [&](int first, int last) {
    for (int head = first; head < last; head += most) {
      const int n_panels = std::min(most, last - head) * head_panels;
      const Tile t{0, n_rows, head * head_panels, n_panels, w.own(w.plan.scratch.t_tile), n_panels * kPanelRows};
      w.k.matmul(&m, t.panel, t.n_panels, block, n_rows, t.out, t.stride);
      place_heads(w, qkv, t);
    }
  };
  multiply_heads(begin * w.plan.group, end * w.plan.group);
  multiply_heads(d.n_heads + begin, d.n_heads + end);
  multiply_heads(d.n_heads + d.n_kv_heads + begin, d.n_heads + d.n_kv_heads + end);
  attend_heads(w, attend, begin, end);
  w.pool.barrier(w.thread);
}

namespace {

// OUT and DOWN of few rows: the product goes to y, and every thread adds it to its own x.
void add_product(Worker &w, const tl_phase &p, const Source &source) {
  const int n = w.plan.desc.dim;
  const float eps = w.plan.desc.norm_eps;
  multiply_to(w, p, source, w.y(0));
  for (int row = 0; row < w.batch.n_rows; row++) {
    float *sum = w.row_buffer(0);
    if (p.block_norm == TL_NORM_PRE) {
      w.k.add(n, w.x(row), w.y(row), w.x(row));
    } else if (p.block_norm == TL_NORM_SUM_SANDWICH) {
      w.k.add(n, w.x(row), w.y(row), sum);
      w.k.rms_norm(n, eps, sum, p.post_norm, w.x(row));
    } else {
      w.k.rms_norm(n, eps, w.y(row), p.post_norm, sum);
      w.k.add(n, w.x(row), sum, w.x(row));
    }
  }
}

}  // namespace

void run_residual(Worker &w, const Step &s) {
  const tl_phase &p = *s.phase;
  const int n = w.plan.desc.dim;
  const bool out = p.kind == TL_PHASE_OUT;
  const Step attend{s.phase - 1, s.stage, s.loop};  // the phase before OUT
  Source source{out ? w.attn(0) : w.hidden(0), out ? pad16(w.plan.q_dim) : w.plan.ffn_pad};
  if (out && merges_late(w, attend)) source.attend = &attend;
  const bool onto_x = p.block_norm == TL_NORM_PRE, branch = p.block_norm == TL_NORM_SANDWICH || p.block_norm == TL_NORM_POST;
  if (w.few) return add_product(w, p, source);
  multiply(w, p.weight, source, w.batch.n_rows, 1, [&](const Tile &t) {
    add_bias(w, t, p.bias);
    for (int r = 0; r < t.n_rows; r++) {
      const int64_t at = t.first_output();
      float *to = (onto_x ? w.x(t.row + r) : w.y(t.row + r)) + at;
      if (branch)
        memcpy(to, t.row_out(r), t.n_outputs() * sizeof(float));
      else
        w.k.add(t.n_outputs(), w.x(t.row + r) + at, t.row_out(r), to);
    }
  });
  if (onto_x) return;
  w.share(w.batch.n_rows, [&](int row) {
    float *to = branch ? w.row_buffer(0) : w.x(row);
    w.k.rms_norm(n, w.plan.desc.norm_eps, w.y(row), p.post_norm, to);
    if (branch) w.k.add(n, w.x(row), to, w.x(row));
  });
}

void run_gate_up(Worker &w, const Step &s) {
  const tl_phase &p = *s.phase;
  const bool gated = p.flags & TL_PHASE_GATED;
  multiply(w, p.weight, {w.x(0), w.plan.dim_pad, p.norm}, w.batch.n_rows, gated ? 2 : 1, [&](const Tile &t) {
    const int first = t.first_output() / (gated ? 2 : 1);  // panels alternate: 16 of gate, 16 of up
    for (int r = 0; r < t.n_rows; r++) w.k.activate_panels(p.option, gated, t.n_panels, t.row_out(r), w.hidden(t.row + r) + first);
  });
}

// x = W [x; e]: the product goes to y first, since every thread still reads x.
void run_inject_matrix(Worker &w, const Step &s) {
  const Source source{w.x(0), w.plan.dim_pad, nullptr, nullptr, w.e(0)};
  float *y = w.few ? w.plan.buffer(w.plan.scratch.z) : w.y(0);  // few: another thread may still read y
  multiply_to(w, *s.phase, source, y);
  w.each_row([&](int row) { memcpy(w.x(row), y + (int64_t)row * w.plan.dim_pad, w.plan.desc.dim * sizeof(float)); });
}

void run_head(Worker &w, const Step &s) {
  const tl_phase &p = *s.phase;
  const tl_batch &b = w.batch;
  const int n = w.plan.desc.dim, vocab = w.plan.desc.vocab_size;
  const bool given = b.sections == TL_RUN_HEAD;  // x_in holds the final states
  const Source source{given ? b.x_in : w.x(0), given ? n : w.plan.dim_pad, p.norm, given ? nullptr : b.out_row};
  if (b.final_x && !given) w.share(b.n_out, [&](int i) { memcpy(b.final_x + (int64_t)i * n, w.x(b.out_row[i]), n * sizeof(float)); });
  if (!b.logits && !b.sampling) return;
  float *logits = b.logits ? b.logits : w.plan.buffer(w.plan.scratch.logits);
  multiply(w, p.weight, source, b.n_out, 1, [&](const Tile &t) {
    const int first = t.first_output(), count = std::min(t.n_outputs(), vocab - first);
    for (int r = 0; r < t.n_rows; r++) {
      w.k.scale_softcap(t.n_outputs(), p.scale, p.softcap, t.row_out(r));
      memcpy(logits + (int64_t)(t.row + r) * vocab + first, t.row_out(r), count * sizeof(float));
    }
  });
  if (!b.sampling) return;
  w.share(b.n_out, [&](int i) {
    float *work = (float *)(w.memory + w.plan.scratch.t_sample);
    b.sampled[i] = draw_token(w.k, vocab, b.sampling[i], logits + (int64_t)i * vocab, work);
  });
}

}  // namespace tl
