// daemons/ops/cuda/gemv_streamed.cu on the cpu: both kernels.
#include "emulated_ptx.h"
#include "gemv_streamed.cu"

static struct {
  const u8* tiles;
  const u16* x;
  u8* stream;
  u16* out;
  int n_rows, n_out, n_chunks, width, n_side, n_teams;
} given;

extern "C" void run_gemv_streamed(int n_blocks, int seed, const u8* tiles, const u16* x, u8* stream, u16* out, int n_rows,
                                  int n_out, int n_chunks, int width, int n_side, int n_teams) {
  given = {tiles, x, stream, out, n_rows, n_out, n_chunks, width, n_side, n_teams};
  run_grid(n_chunks, N, 32, seed, [] { stream_rows(given.x, given.stream, given.n_rows, given.width); });
  auto kernel = [] {
    gemv_streamed(given.tiles, given.stream, given.out, given.n_rows, given.n_out, given.n_chunks, given.n_side, given.n_teams);
  };
  run_grid(n_blocks, 1, 32 * n_side * n_teams, seed, kernel, CLUSTER);
}
