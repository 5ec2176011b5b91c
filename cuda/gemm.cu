// Matrix product for many batch rows on mma.sync: 128 outputs x 64 rows a CTA, weights as the left operand, float32
// accumulators. Fused: int8 scales, bias and the epilogue.
//
// The numbers are those of gemv.cu: chunks of TL_K_CHUNK columns, each summed from zero by one chain of mma.sync over
// blocks of sixteen, added in index order. Rows beyond the batch share the tile and are not stored.
#include "gemm.cuh"
#include "weights.cuh"

namespace tl {
namespace {

constexpr int kTilePanels = 8;   // 128 outputs
constexpr int kTileGroups = 8;   // of eight batch rows: 64
constexpr int kStages = 4;       // of 64 columns
constexpr int kStageColumns = 64;
constexpr int kStageBlocks = kStageColumns / 16;
constexpr int kGroupBytes = kStageColumns * 8 * 2;  // eight batch rows of a stage
constexpr int kWarpPanels = 2, kWarpTiles = 4;      // of a warp: 32 outputs x 32 rows

using Accumulator = float[kWarpPanels][kWarpTiles][4];

TL_DEVICE void clear(Accumulator &x) {
#pragma unroll
  for (int i = 0; i < kWarpPanels * kWarpTiles * 4; i++) x[i / 16][i / 4 % 4][i % 4] = 0.0f;
}

// Requests the columns of one stage: the weights' panels, then the batch rows' groups.
template <class W>
TL_DEVICE void request_stage(const GemmArgs &g, uint8_t *to, int stage, int first_panel, int first_group) {
  constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  const int64_t panel_bytes = panel_nbytes(g.weight.dtype, g.weight.n_in);
  const int64_t left = panel_bytes - (int64_t)stage * kPanelBytes;
  const int n_panels = min(kTilePanels, g.weight.n_out / kPanelRows - first_panel);
  const uint8_t *panels = g.weight.data + first_panel * panel_bytes + (int64_t)stage * kPanelBytes;
  for (int i = threadIdx.x * 16; i < n_panels * kPanelBytes && left > 0; i += kThreads * 16)
    if (i % kPanelBytes < left) copy16_async(to + i, panels + i / kPanelBytes * panel_bytes + i % kPanelBytes);
  const int n_groups = min(kTileGroups, g.source.n_groups - first_group);
  const uint8_t *groups = (const uint8_t *)g.source.data + ((int64_t)stage * g.source.n_groups + first_group) * kGroupBytes;
  for (int i = threadIdx.x * 16; i < n_groups * kGroupBytes && left > 0; i += kThreads * 16)
    copy16_async(to + kTilePanels * kPanelBytes + i, groups + i);
  commit_copies();
}

// Adds one block of a stage to the warp's accumulators.
template <class W>
TL_DEVICE void add_block(Accumulator &x, const uint8_t *stage, int block, int warp_panel, int warp_group) {
  constexpr int kPanelBytes = kStageBlocks * W::kBlockBytes;
  const shared_t panels = shared_of(stage) + warp_panel * kPanelBytes + block * W::kBlockBytes + lane_id() * W::kLaneBytes;
  const shared_t groups =
      shared_of(stage) + kTilePanels * kPanelBytes + warp_group * kGroupBytes + block * 256 + lane_id() / 16 * kGroupBytes + lane_id() % 16 * 16;
  uint32_t w[kWarpPanels][4], a[kWarpTiles / 2][4];
#pragma unroll
  for (int i = 0; i < kWarpPanels; i++) W::load(w[i], panels + i * kPanelBytes);
#pragma unroll
  for (int j = 0; j < kWarpTiles / 2; j++) ldmatrix4(a[j], groups + 2 * j * kGroupBytes);  // two groups: lanes 0-15 address the first's two tiles
#pragma unroll
  for (int i = 0; i < kWarpPanels; i++)
#pragma unroll
    for (int j = 0; j < kWarpTiles; j++) W::Op::mma(x[i][j], w[i], a[j / 2][j % 2 * 2], a[j / 2][j % 2 * 2 + 1]);
}

// chunk += x * scale of the columns' group, and x is empty again.
TL_DEVICE void scale_group(Accumulator &chunk, Accumulator &x, const GemmArgs &g, int panel, int column) {
#pragma unroll
  for (int i = 0; i < kWarpPanels; i++) {
    const bool exists = (panel + i) * kPanelRows < g.weight.n_out;
    const float *scale = g.weight.scales + scale_offset(g.weight, (panel + i) * kPanelRows, column / g.weight.group_size) + lane_id() / 4;
#pragma unroll
    for (int k = 0; k < kWarpTiles * 4; k++)
      chunk[i][k / 4][k % 4] = fmaf(x[i][k / 4][k % 4], exists ? scale[k % 4 / 2 * 8] : 0.0f, chunk[i][k / 4][k % 4]);
  }
  clear(x);
}

TL_DEVICE void add_chunk(Accumulator &total, Accumulator &chunk) {
#pragma unroll
  for (int i = 0; i < kWarpPanels * kWarpTiles * 4; i++)
    total[i / 16][i / 4 % 4][i % 4] = total[i / 16][i / 4 % 4][i % 4] + chunk[i / 16][i / 4 % 4][i % 4];
  clear(chunk);
}

template <class W>
TL_DEVICE void finish(const GemmArgs &g, Accumulator &total, int panel, int first_row) {
  const bool scaled = W::kInt8 && !g.weight.group_size, gated = g.epilogue.kind == kActivate && g.epilogue.gated;
#pragma unroll
  for (int i = 0; i < kWarpPanels; i++)
#pragma unroll
    for (int k = 0; k < kWarpTiles * 4; k++) {
      const int output = (panel + i) * kPanelRows + lane_id() / 4 + k % 4 / 2 * 8;
      if (output >= g.weight.n_out) continue;
      float &y = total[i][k / 4][k % 4];
      if (scaled) y = y * g.weight.scales[output];
      if (g.bias) y = y + g.bias[output];
    }
#pragma unroll
  for (int k = 0; k < kWarpTiles * 4; k++) {
    const int row = first_row + k / 4 * 8 + lane_id() % 4 * 2 + k % 2, output = panel * kPanelRows + lane_id() / 4 + k % 4 / 2 * 8;
    if (row >= g.n_rows || output >= g.weight.n_out) continue;
    if (gated) {
      finish_gated(g.epilogue, row, output, total[0][k / 4][k % 4], total[1][k / 4][k % 4]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kWarpPanels; i++)
      if (output + i * kPanelRows < g.weight.n_out) finish_output(g.epilogue, row, output + i * kPanelRows, total[i][k / 4][k % 4]);
  }
}

template <class W, bool kGrouped>
__global__ void __launch_bounds__(kThreads) gemm(const GemmArgs g) {
  constexpr int kStageBytes = kTilePanels * kStageBlocks * W::kBlockBytes + kTileGroups * kGroupBytes;
  uint8_t *shared = shared_memory<uint8_t>();
  const int n_blocks = pad16(g.weight.n_in) / 16, n_stages = (n_blocks + kStageBlocks - 1) / kStageBlocks;
  const int first_panel = blockIdx.y * kTilePanels, first_group = blockIdx.x * kTileGroups;
  const int warp_panel = warp_id() / 2 * kWarpPanels, warp_group = warp_id() % 2 * kWarpTiles;
  let_next_kernel_start();
  wait_for_previous_kernel();
  for (int s = 0; s < kStages - 1; s++) request_stage<W>(g, shared + s * kStageBytes, s, first_panel, first_group);
  Accumulator total, x;
  clear(total);
  clear(x);
  Accumulator chunk;  // used where kGrouped
  if (kGrouped) clear(chunk);
  for (int s = 0; s < n_stages; s++) {
    wait_copies<kStages - 2>();
    __syncthreads();
    request_stage<W>(g, shared + (s + kStages - 1) % kStages * kStageBytes, s + kStages - 1, first_panel, first_group);
#pragma unroll
    for (int b = 0; b < kStageBlocks; b++) {
      if (s * kStageBlocks + b >= n_blocks) break;
      add_block<W>(x, shared + s % kStages * kStageBytes, b, warp_panel, warp_group);
      if (kGrouped && ((b + 1) % (kScaleColumns / 16) == 0 || s * kStageBlocks + b + 1 == n_blocks))
        scale_group(chunk, x, g, first_panel + warp_panel, (s * kStageBlocks + b) * 16);
    }
    if ((s + 1) * kStageColumns % TL_K_CHUNK == 0 || s + 1 == n_stages) add_chunk(total, kGrouped ? chunk : x);
  }
  wait_copies<0>();
  finish<W>(g, total, first_panel + warp_panel, (first_group + warp_group) * 8);
}

template <class W, bool kGrouped>
void launch_with(const Launcher &launcher, const GemmArgs &args) {
  constexpr int kStageBytes = kTilePanels * kStageBlocks * W::kBlockBytes + kTileGroups * kGroupBytes;
  const int rows_of_tile = kTileGroups * 8, outputs_of_tile = kTilePanels * kPanelRows;
  const dim3 grid((args.n_rows + rows_of_tile - 1) / rows_of_tile, (args.weight.n_out + outputs_of_tile - 1) / outputs_of_tile);
  launcher.launch(gemm<W, kGrouped>, Shape{grid, kThreads, kStages * kStageBytes, 1}, args);
}

}  // namespace

bool gemm_takes_wgmma(const tl_context &context, const Matrix &weight) {
  return context.code == kCodeSm90a && weight.dtype != TL_F32 && !weight.group_size;
}

bool gemm_places(const tl_context &context, const Matrix &weight, const PlaceArgs &place) {
  return gemm_takes_wgmma(context, weight) && !is_quantised(place.kv.dtype) && place.qk_norm != TL_QK_NORM_FULL && 128 % place.kv.head_pad == 0;
}

void launch_gemm(const Launcher &launcher, const GemmArgs &args) {
  if (gemm_takes_wgmma(launcher.context, args.weight)) return launch_gemm_wgmma(launcher, args);
  switch (args.weight.dtype) {
    case TL_BF16: return launch_with<FloatWeights<Bf16>, false>(launcher, args);
    case TL_F16: return launch_with<FloatWeights<F16>, false>(launcher, args);
    default:
      if (args.weight.group_size) return launch_with<Int8Weights, true>(launcher, args);
      return launch_with<Int8Weights, false>(launcher, args);
  }
}

}  // namespace tl
