// From a batch to kernel launches: which kernel takes a phase, and which row operations ride along with it.
//
// What lies between two matrix products touches one row at a time. It is gathered into a row program, which runs at the
// head of the next product where that is a gemv of one row, else in a kernel of its own that leaves the operand behind.
#include <algorithm>

#include "attend.cuh"
#include "gemm.cuh"
#include "lower_rows.h"
#include "operands.cuh"
#include "sample.cuh"

namespace tl {
namespace {

enum class Path { kGemv, kGemm, kF32 };

class Lowering {
 public:
  Lowering(tl_plan &plan, const tl_batch &batch, cudaStream_t stream)
      : p_(plan), d_(plan.desc), b_(batch), n_rows_(batch.n_rows), kernels_(plan, stream), rows_(plan, batch, kernels_) {}

  void run() {
    lower();
    kernels_.release();
  }

 private:
  void lower() {
    plan_spans();
    if (b_.sections & TL_RUN_PRELUDE)
      section(0, TL_STAGE_PRELUDE);
    else if (b_.n_rows && b_.x_in)
      rows_.add(kRowLoad, b_.x_in, d_.dim);
    if (b_.sections & TL_RUN_CORE)
      for (int loop = b_.loop_begin; loop < b_.loop_end; loop++) {
        kernels_.mark_loop();
        section(1, TL_STAGE_CORE + loop);
        if (b_.boundary_x && b_.n_out) copy_out_rows(b_.boundary_x + (int64_t)(loop - b_.loop_begin) * b_.n_out * d_.dim);
      }
    kernels_.mark_loop();
    if (b_.x_out) {
      rows_.add(kRowStore, b_.x_out, d_.dim);
      rows_.flush();  // the head's program runs for the out rows alone
    }
    if (b_.sections & TL_RUN_CODA) section(2, TL_STAGE_CODA);
    if (!(b_.sections & TL_RUN_HEAD)) return rows_.flush_first();
    if (b_.n_out) section(3, 0);
  }

  // What the loops inject: saved by this batch's prelude, or given where it is left out.
  bool e_is_given() const { return b_.e_in && !(b_.sections & TL_RUN_PRELUDE); }
  const float *e() const { return e_is_given() ? b_.e_in : p_.buffer(p_.scratch.e); }
  int e_stride() const { return e_is_given() ? d_.dim : p_.dim_pad; }
  float *y() const { return p_.buffer(p_.scratch.y); }

  const Launcher &launcher() { return kernels_.launcher(); }

  // ---- products

  // Sixteen rows of one sequence take less than eight did by gemv.
  int most_gemv_rows(const tl_matrix &weight) const {
    return shares_keys() && gemm_takes_wgmma(p_.context, matrix_of(weight)) ? kGemvRows / 2 : kGemvRows;
  }

  Path path_of(const tl_matrix &weight, int n_rows) const {
    if (weight.dtype == TL_F32) return Path::kF32;
    if (n_rows > most_gemv_rows(weight)) return Path::kGemm;
    GemvArgs largest = {matrix_of(weight), rows_.x(), n_rows, weight.n_out % 32 ? 1 : 2, {}, {}, {}};  // of what a phase may ask for
    largest.epilogue.kind = kAddToRows;
    return gemv_shared_nbytes(p_.context, largest) <= p_.context.max_shared_nbytes ? Path::kGemv : Path::kGemm;
  }

  Operand operand_of(uint64_t offset, const tl_matrix &weight, int n_rows) const {
    const int layout = path_of(weight, n_rows) == Path::kGemm ? kOperandTiles : kOperandRows;
    return {p_.memory + offset, operand_dtype(weight.dtype), layout, pad16(weight.n_in), round_up(n_rows, kRowTile) / 8};
  }

  void product(const tl_phase &phase, int n_rows, const Operand &source, const RowProgram *program, const Epilogue &epilogue) {
    multiply(path_of(phase.weight, n_rows), matrix_of(phase.weight), phase.bias, n_rows, source, program, epilogue);
  }

  void multiply(Path path, const Matrix &weight, const float *bias, int n_rows, const Operand &source, const RowProgram *program,
                const Epilogue &epilogue) {
    if (path == Path::kGemv) {
      GemvArgs g = {weight, bias, n_rows, epilogue.kind == kActivate && epilogue.gated ? 2 : 1, source, {}, epilogue};
      if (program) g.program = *program;
      return n_rows == 1 ? kernels_.keep(g) : launch_gemv(launcher(), g);
    }
    if (epilogue.kind == kToSums) {
      sums_ = launch_gemm_sums(launcher(), weight, bias, n_rows, source, epilogue.out);
      return;
    }
    const GemmArgs g{weight, bias, n_rows, source, epilogue, place_};
    return path == Path::kF32 ? launch_gemm_f32(launcher(), g) : launch_gemm(launcher(), g);
  }

  // A product of the program's result, normed where the phase has a norm, with e behind it where asked.
  void product_of_rows(const tl_phase &phase, int n_rows, const Epilogue &epilogue, bool keeps_x, bool with_e = false) {
    if (with_e) rows_.program.tail = e(), rows_.program.tail_stride = e_stride();
    const bool kept = phase.kind == TL_PHASE_QKV && b_.operand_table;  // beyond the batch
    const bool fused = !kept && n_rows == 1 && path_of(phase.weight, 1) == Path::kGemv && fits_gemv(rows_.program);
    const bool stores = keeps_x && rows_.changed(), moves = stores && fused;  // CTAs that run the same program still read x
    if (stores) rows_.store(moves ? rows_.other() : rows_.x());
    if (phase.norm) rows_.add(kRowNorm, phase.norm);
    const Operand operand = operand_of(p_.scratch.operand, phase.weight, n_rows);
    if (!fused) launch_rows(launcher(), n_rows, RowsArgs{rows_.program, operand});
    if (kept) move_operands(phase, operand, false);
    product(phase, n_rows, operand, fused ? &rows_.program : nullptr, epilogue);
    moves ? rows_.restart_other() : rows_.restart();
  }

  // ---- phases

  void section(int index, int stage) {
    stage_ = stage;
    for (int i = d_.section[index]; i < d_.section[index + 1]; i++) phase(i);
  }

  void phase(int i) {
    const tl_phase &f = p_.phases[i];
    if ((b_.sections & TL_RUN_REBUILD) && f.kind != TL_PHASE_QKV) return;
    switch (f.kind) {
      case TL_PHASE_EMBED: rows_.program.embedding = matrix_of(f.weight); return rows_.add(kRowEmbed, nullptr, 0, f.scale);
      case TL_PHASE_STATE_INIT: return state_init(f);
      case TL_PHASE_INJECT: return f.weight.data ? inject(f) : rows_.add(kRowAdd, e(), e_stride());
      case TL_PHASE_QKV: return qkv(f);
      case TL_PHASE_ATTEND: return attend(f, p_.phases[i + 1]);
      case TL_PHASE_OUT: return residual(f, p_.scratch.attn);
      case TL_PHASE_GATE_UP: return gate_up(f, p_.phases[i + 1]);
      case TL_PHASE_DOWN: return residual(f, p_.scratch.hidden);
      case TL_PHASE_NORM: return rows_.add(kRowNorm, f.norm);
      default: return head(f);
    }
  }

  void state_init(const tl_phase &f) {
    const bool saves = f.flags & TL_PHASE_SAVE_INPUT;
    if (saves) rows_.store(p_.buffer(p_.scratch.e));
    if (b_.e_out) rows_.add(kRowStore, b_.e_out, d_.dim);
    if (b_.x_in)
      rows_.add(kRowLoad, b_.x_in, d_.dim);
    else if (f.option == TL_INIT_ZERO)
      rows_.add(kRowZero);
    else if (f.option == TL_INIT_NORMAL)
      rows_.add(kRowNoise, nullptr, 0, f.scale, f.seed);
    if (saves || b_.e_out) rows_.flush();  // e must be in memory before anyone adds it, and is every row's
  }

  void inject(const tl_phase &f) {
    Epilogue to_x = {};
    to_x.kind = kToRows;
    to_x.out = rows_.other();
    to_x.stride = p_.dim_pad;
    product_of_rows(f, n_rows_, to_x, false, true);
    rows_.restart_other();
  }

  void qkv(const tl_phase &f) {
    place_ = {};
    place_.rows = Rows{b_.pos, b_.seq, b_.page_table, n_rows_, stage_, d_.table_stride};
    place_.kv = kv_layer(d_, f.part, f.layer);
    place_.qkv = p_.buffer(p_.scratch.qkv);
    place_.n_heads = d_.n_heads;
    place_.n_kv_heads = d_.n_kv_heads;
    place_.head_dim = d_.head_dim;
    place_.qk_norm = d_.qk_norm;
    place_.eps = d_.norm_eps;
    place_.q_norm = f.q_norm;
    place_.k_norm = f.k_norm;
    place_.rotary_dim = f.flags & TL_PHASE_ROPE ? d_.rotary_dim : 0;
    place_.interleaved = d_.rope_interleaved;
    place_.cos = d_.rope_cos;
    place_.sin = d_.rope_sin;
    place_.q = p_.memory + p_.scratch.q;
    place_.turn = rotation_block(d_.kv_dtype, d_.head_dim);
    place_.turn_scale = 1.0f / __builtin_sqrtf((float)place_.turn);
    if (b_.sections & TL_RUN_REBUILD) return rebuild(f);
    place_.n_clamped = (unsigned long long *)(p_.memory + p_.scratch.n_clamped);
    const bool sums = leaves_sums_here(f);
    placed_ = !sums && path_of(f.weight, n_rows_) == Path::kGemm && gemm_places(p_.context, matrix_of(f.weight), place_);
    Epilogue to_qkv = {};
    to_qkv.kind = sums ? kToSums : placed_ ? kPlace : kToRows;
    to_qkv.out = p_.buffer(sums ? p_.scratch.sums : p_.scratch.qkv);
    to_qkv.stride = f.weight.n_out;
    product_of_rows(f, n_rows_, to_qkv, true);
    if (sums) place_.sums = sums_;
  }

  bool leaves_sums_here(const tl_phase &f) const { return path_of(f.weight, n_rows_) == Path::kGemm && leaves_sums(p_, f, n_rows_); }

  // The rows' operands of a QKV phase to their pages, or from there.
  void move_operands(const tl_phase &f, const Operand &operand, bool loads) {
    const tl_phase *phases = p_.phases.data();
    const int n = (int)p_.phases.size();
    const Rows rows{b_.pos, b_.seq, b_.operand_table, n_rows_, stage_, d_.table_stride};
    const uint64_t page = operand_page_nbytes(phases, n, f.part), layer = operand_nbytes(phases, n, f.part, &f);
    launch_operand_rows(launcher(), {rows, (uint8_t *)d_.operand_base[f.part], page, layer, f.weight.n_in, operand, loads});
  }

  // K and V of rows whose operands are kept: the outputs of the product behind q, and what follows them.
  void rebuild(const tl_phase &f) {
    const Operand operand = operand_of(p_.scratch.operand, f.weight, n_rows_);
    const int first = d_.n_heads * p_.head_pad;
    move_operands(f, operand, true);
    Epilogue to_qkv = {};
    to_qkv.kind = kToRows;
    to_qkv.out = p_.buffer(p_.scratch.qkv) + first;
    to_qkv.stride = f.weight.n_out;
    multiply(path_of(f.weight, n_rows_), rows_from(matrix_of(f.weight), first), f.bias ? f.bias + first : nullptr, n_rows_, operand, nullptr, to_qkv);
    place_.first_head = d_.n_heads;
    launch_place(launcher(), place_);
  }

  // ---- attention

  int window_of(const tl_phase &f) const { return b_.window && f.window ? std::min(b_.window, f.window) : b_.window + f.window; }

  // Whether queries are enough for the attention of many rows.
  bool fills() const {
    constexpr int kEnoughTiles = 64;
    return (n_rows_ * (d_.n_heads / d_.n_kv_heads) + 63) / 64 * d_.n_kv_heads >= kEnoughTiles;
  }

  // Rows that are all asked for are mostly of as many sequences, and share no keys.
  bool shares_keys() const { return n_rows_ > 1 && 2 * b_.n_out <= n_rows_ && !b_.decode; }

  // For attention of some rows: the windows of the layers, and what is found for each at the beginning.
  void plan_spans() {
    if (!shares_keys() || fills() || (b_.sections & TL_RUN_REBUILD) || !attends_by_states(p_.context, d_, n_rows_)) return;
    for (const tl_phase &f : p_.phases) {
      if (f.kind != TL_PHASE_ATTEND || (int)windows_.size() == kMaxWindows) continue;
      if (std::find(windows_.begin(), windows_.end(), window_of(f)) == windows_.end()) windows_.push_back(window_of(f));
    }
    const Rows rows{b_.pos, b_.seq, b_.page_table, n_rows_, 0, d_.table_stride};
    launch_plan_spans(launcher(), rows, d_, windows_, p_.memory + p_.scratch.states);
  }

  void attend(const tl_phase &f, const tl_phase &out) {
    const int group = d_.n_heads / d_.n_kv_heads;
    AttendArgs args = {};
    args.place = place_;
    args.window = window_of(f);
    args.scale = 1.44269504f / __builtin_sqrtf((float)d_.head_dim);
    args.out = operand_of(p_.scratch.attn, out.weight, n_rows_);
    args.place_here = n_rows_ == 1 && d_.qk_norm != TL_QK_NORM_FULL && d_.kv_dtype != TL_F32;
    if (!args.place_here && !placed_) launch_place(launcher(), place_);
    if (d_.kv_dtype == TL_F32) return launch_attend_f32(launcher(), args);
    if (fills() && !b_.decode && (launch_attend_wide(launcher(), args) || launch_attend_tile(launcher(), args))) return;
    const auto window = std::find(windows_.begin(), windows_.end(), args.window);
    if (window != windows_.end()) return launch_attend_states(launcher(), args, window - windows_.begin(), p_.memory + p_.scratch.states);
    if (shares_keys() && launch_attend_few(launcher(), args)) return;
    args.rows_of_tile = b_.decode || n_rows_ == 1 ? 1 : std::max(1, kTileQueries / group);
    if (args.place_here) return kernels_.keep(args);
    launch_attend_split(launcher(), args);
  }

  void residual(const tl_phase &f, uint64_t source) {
    const bool onto_x = f.block_norm == TL_NORM_PRE, branch = f.block_norm == TL_NORM_SANDWICH || f.block_norm == TL_NORM_POST;
    if (leaves_sums_here(f)) {
      Epilogue to_sums = {};
      to_sums.kind = kToSums;
      to_sums.out = p_.buffer(p_.scratch.sums);
      product(f, n_rows_, operand_of(source, f.weight, n_rows_), nullptr, to_sums);
      rows_.program.sums = sums_;
      rows_.add(kRowSums);
      if (!branch) rows_.add_x();
      if (!onto_x) rows_.add(kRowNorm, f.post_norm);
      if (branch) rows_.add_x();
      return;
    }
    Epilogue to = {};
    to.kind = branch ? kToRows : kAddToRows;
    to.out = onto_x ? rows_.x() : y();
    to.addend = rows_.x();
    to.stride = p_.dim_pad;
    product(f, n_rows_, operand_of(source, f.weight, n_rows_), nullptr, to);
    if (onto_x) return;
    rows_.add(kRowLoad, y(), p_.dim_pad);
    rows_.add(kRowNorm, f.post_norm);
    if (branch) rows_.add_x();
  }

  void gate_up(const tl_phase &f, const tl_phase &down) {
    Epilogue to_hidden = {};
    to_hidden.kind = kActivate;
    to_hidden.act = f.option;
    to_hidden.gated = f.flags & TL_PHASE_GATED;
    to_hidden.operand = operand_of(p_.scratch.hidden, down.weight, n_rows_);
    product_of_rows(f, n_rows_, to_hidden, true);
  }

  void copy_out_rows(float *to) {
    rows_.flush();
    launch_copy_rows(launcher(), b_.n_out, CopyArgs{d_.dim, p_.dim_pad, rows_.x(), b_.out_row, to});
  }

  void head(const tl_phase &f) {
    const bool given = b_.sections == TL_RUN_HEAD;  // x_in holds the final states
    if (given)
      rows_.add(kRowLoad, b_.x_in, d_.dim);
    else if (b_.final_x)
      copy_out_rows(b_.final_x);
    if (!b_.logits && !b_.sampling) return;
    if (!given) {
      if (rows_.program.op[0].kind != kRowLoad) rows_.flush();
      if (n_rows_ > 1) rows_.program.source_row = b_.out_row;
    }
    Epilogue to_logits = {};
    to_logits.kind = kToLogits;
    to_logits.out = b_.logits ? b_.logits : p_.buffer(p_.scratch.logits);
    to_logits.stride = to_logits.n_valid = d_.vocab_size;
    to_logits.scale = f.scale;
    to_logits.cap = f.softcap;
    product_of_rows(f, b_.n_out, to_logits, false);
    if (!b_.sampling) return;
    SampleArgs s = {d_.vocab_size, b_.sampling, to_logits.out, p_.buffer(p_.scratch.sample_work), b_.sampled, b_.decode, nullptr, nullptr, {}, 0};
    if (b_.decode) s.token = const_cast<int32_t *>(b_.token), s.pos = const_cast<int32_t *>(b_.pos);
    launch_sample(launcher(), b_.n_out, s);
  }

  tl_plan &p_;
  const tl_plan_desc &d_;
  const tl_batch &b_;
  const int n_rows_;
  Kernels kernels_;
  RowState rows_;
  int stage_ = 0;
  PlaceArgs place_{};     // of the latest QKV phase
  bool placed_ = false;   // whether its product has done the work already
  ChunkSums sums_{};      // that the latest product has left
  std::vector<int> windows_;  // of the layers, where attention goes through states
};

}  // namespace

void enqueue_batch(tl_plan &plan, const tl_batch &batch, cudaStream_t stream) { Lowering(plan, batch, stream).run(); }

}  // namespace tl
