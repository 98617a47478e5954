// daemons/ops/cuda/delta_net_batch.cu on the cpu.
#include "emulated_ptx.h"
#include "delta_net_batch.cu"

static struct {
  const u16* y;
  u16* out;
  float *conv_states, *states;
  const long long *ids, *kept;
  const float *conv_weight, *decay_rates, *dt_bias, *norm;
  int n_slices, y_stride;
  float norm_eps, l2_eps, scale;
} given;

extern "C" void run_delta_net_batch(int n_blocks, int seed, const u16* y, u16* out, float* conv_states, float* states,
                                    const long long* ids, const long long* kept, const float* conv_weight, const float* decay_rates,
                                    const float* dt_bias, const float* norm, int n_slices, int y_stride, float norm_eps,
                                    float l2_eps, float scale) {
  given = {y, out, conv_states, states, ids, kept, conv_weight, decay_rates, dt_bias, norm, n_slices, y_stride, norm_eps, l2_eps, scale};
  auto kernel = [] {
    delta_net_batch(given.y, given.out, given.conv_states, given.states, given.ids, given.kept, given.conv_weight, given.decay_rates,
                    given.dt_bias, given.norm, given.n_slices, given.y_stride, given.norm_eps, given.l2_eps, given.scale);
  };
  run_grid(n_blocks, 1, THREADS + 32, seed, kernel);
}
