// daemons/ops/cuda/delta_net.cu on the cpu.
#include "emulated_ptx.h"
#include "delta_net.cu"

static struct {
  const u16* y;
  u16* out;
  float *conv_states, *states, *updates;
  const long long *ids, *kept;
  const float *conv_weight, *decay_rates, *dt_bias, *norm;
  int n, y_stride;
  float norm_eps, l2_eps, scale;
} given;

extern "C" void run_delta_net(int n_slices, int seed, const u16* y, u16* out, float* conv_states, float* states, float* updates,
                              const long long* ids, const long long* kept, const float* conv_weight, const float* decay_rates,
                              const float* dt_bias, const float* norm, int n, int y_stride, float norm_eps, float l2_eps,
                              float scale) {
  given = {y, out, conv_states, states, updates, ids, kept, conv_weight, decay_rates, dt_bias, norm, n, y_stride, norm_eps, l2_eps, scale};
  auto kernel = [] {
    delta_net(given.y, given.out, given.conv_states, given.states, given.updates, given.ids, given.kept, given.conv_weight,
              given.decay_rates, given.dt_bias, given.norm, given.n, given.y_stride, given.norm_eps, given.l2_eps, given.scale);
  };
  run_grid(N_VALUE * HALVES, n_slices, THREADS, seed, kernel, CLUSTER);
}
