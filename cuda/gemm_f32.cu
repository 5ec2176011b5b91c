// Matrix product with float32 weights, the reference path of tests: a warp computes sixteen outputs of two batch rows by
// plain fused multiply-adds, chunks of TL_K_CHUNK columns from zero, added in index order.
#include "gemm.cuh"

namespace tl {
namespace {

__global__ void __launch_bounds__(kThreads) gemm_f32(const GemmArgs g) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int n_panels = g.weight.n_out / kPanelRows, n_in = g.weight.n_in;
  const int unit = blockIdx.x * kWarps + warp_id(), panel = unit % n_panels, r = lane_id() % 16;
  const int row = unit / n_panels * 2 + lane_id() / 16;
  if (row >= g.n_rows) return;
  const float *weights = (const float *)(g.weight.data + panel * panel_nbytes(TL_F32, n_in)) + r;
  const float *operand = (const float *)g.source.data + (int64_t)row * g.source.n_in;
  const auto output_of = [&](const float *w) {
    float total = 0.0f;
    for (int first = 0; first < n_in; first += TL_K_CHUNK) {
      float sum = 0.0f;
      for (int k = first; k < min(first + TL_K_CHUNK, n_in); k++) sum = fmaf(w[(int64_t)k * kPanelRows], operand[k], sum);
      total = total + sum;
    }
    return total;
  };
  const int output = panel * kPanelRows + r;
  float y = output_of(weights);
  if (g.bias) y = y + g.bias[output];
  if (g.epilogue.kind != kActivate || !g.epilogue.gated) return finish_output(g.epilogue, row, output, y);
  if (panel % 2) return;  // an up panel: done with its gate
  finish_gated(g.epilogue, row, output, y, output_of(weights + (int64_t)n_in * kPanelRows));
}

}  // namespace

void launch_gemm_f32(const Launcher &launcher, const GemmArgs &args) {
  const int n_units = args.weight.n_out / kPanelRows * ((args.n_rows + 1) / 2);
  launcher.launch(gemm_f32, Shape{dim3((n_units + kWarps - 1) / kWarps), kThreads, 0, 1}, args);
}

}  // namespace tl
