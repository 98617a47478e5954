// daemons/ops/cuda/gemv_experts.cu on the cpu: both kernels.
#include "emulated_ptx.h"
#include "gemv_experts.cu"

static struct {
  const u8* tiles;
  const u16* x;
  const long long* experts;
  int *pairs, *offsets;
  u16* out;
  int n_pairs, n_experts, n_out, n_chunks, width, pairs_per_row;
} given;

extern "C" void run_gemv_experts(int n_blocks, int seed, const u8* tiles, const u16* x, const long long* experts, int* pairs,
                                 int* offsets, u16* out, int n_pairs, int n_experts, int n_out, int n_chunks, int width,
                                 int pairs_per_row) {
  given = {tiles, x, experts, pairs, offsets, out, n_pairs, n_experts, n_out, n_chunks, width, pairs_per_row};
  run_grid(1, 1, ORDER_THREADS, seed, [] { order_pairs(given.experts, given.pairs, given.offsets, given.n_pairs, given.n_experts); });
  auto kernel = [] {
    gemv_experts(given.tiles, given.x, given.pairs, given.offsets, given.out, given.n_out, given.n_chunks, given.width,
                 given.pairs_per_row);
  };
  run_grid(n_blocks, n_experts, 32 * WARPS, seed, kernel);
}
