// The recurrent gated delta net of short slices: causal convolution, silu, l2 norms, gates, delta rule, gated norm.
//
// A block holds the state S [128, 128] of a value head of a slice in registers: a lane four columns, a warp 128 / WARPS rows.
// HEADS value heads share a key head and form a cluster, so that none writes a convolution window that another still reads.
// Formulas: daemons/ops/triton/recurrent_delta_rule.py, whose sums differ in order only.  S is read before the kernels ahead are
// waited for: between two steps there is a launch that waits for all.  Compiled with HEADS, N_KEY, TAPS of the convolution and WARPS.

#include "delta_net_math.cuh"

constexpr int THREADS = WARPS * 32, MINE = (3 * DIM + THREADS - 1) / THREADS;

// What a slice's tokens find in front of them: the window of the state that they start from, then inputs
struct Inputs {
  const u16* y;        // of the slice's first token
  const float* window; // [TAPS - 1, CHANNELS]
  long long stride;

  // The input of a channel `back` tokens before token i.
  DEVICE float at(int i, int back, int channel) const {
    if (i < back) return window[(i - back + TAPS - 1) * CHANNELS + channel];
    return number(y + (i - back) * stride + channel);
  }
};

// Grid (N_VALUE, slices).  y [slices n, columns] with y_stride from row to row; out [slices n, N_VALUE DIM]; pools conv_states [states, TAPS - 1,
// CHANNELS] and states [states, N_VALUE, DIM, DIM]; ids [slices]; kept [slices, n]: the row that gets the state after each token, or -1.
extern "C" __global__ void
#if HEADS > 1
    __cluster_dims__(HEADS, 1, 1)
#endif
        __launch_bounds__(THREADS, 2)
            delta_net(const u16* y, u16* out, float* conv_states, float* states, const long long* ids, const long long* kept,
                      const float* conv_weight, const float* decay_rates, const float* dt_bias, const float* norm, int n,
                      int y_stride, float norm_eps, float l2_eps, float scale) {
  extern __shared__ __align__(128) u8 memory[];
  float* inputs = (float*)memory;           // [2, 3 DIM]: q, k and v of this token and of the one before
  float* parts = inputs + 2 * 3 * DIM;      // [WARPS, 2, DIM]: sums of S with k and with q
  launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = (int)blockIdx.x % HEADS, key = (int)blockIdx.x / HEADS;
  int head = rank * N_KEY + key;
  long long state = ids[blockIdx.y], first = (long long)blockIdx.y * n;
  float* matrix = states + (head * DIM + warp * LINES) * DIM + lane * 4;
  constexpr long long STATE = (long long)N_VALUE * DIM * DIM;
  float4 s[LINES];
#pragma unroll
  for (int r = 0; r < LINES; r++) s[r] = *(const float4*)(matrix + state * STATE + r * DIM);
  int channel[MINE];
  float tap[MINE][TAPS];
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    int c = threadIdx.x + m * THREADS;
    channel[m] = c % DIM + (c < DIM ? key : c < 2 * DIM ? N_KEY + key : 2 * N_KEY + head) * DIM;
#pragma unroll
    for (int t = 0; t < TAPS; t++) tap[m][t] = c < 3 * DIM ? conv_weight[t * CHANNELS + channel[m]] : 0.f;
  }
  float rate = decay_rates[head], bias = dt_bias[head];
  wait_for_inputs();
  Inputs given = {y + first * y_stride, conv_states + state * (TAPS - 1) * CHANNELS, y_stride};
  int n_moved = 0;
  for (int i = 0; i < n; i++) {
    long long target = kept[first + i];
    const u16* row = y + (first + i) * y_stride;
    float* mine = inputs + i % 2 * (3 * DIM);
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      int c = threadIdx.x + m * THREADS;
      if (c >= 3 * DIM) continue;
      float x = 0.f;
#pragma unroll
      for (int t = 0; t < TAPS; t++) {
        float in = given.at(i, TAPS - 1 - t, channel[m]);
        x += in * tap[m][t];
        if (t > 0 && target >= 0 && target != state && (rank == 0 || c >= 2 * DIM))
          conv_states[(target * (TAPS - 1) + t - 1) * CHANNELS + channel[m]] = in;
      }
      mine[c] = x * sigmoid(x);
    }
    if (target == state) n_moved = i + 1;
    Gates gates = gates_of(row, head, rate, bias);
    __syncthreads();
    const float* k = mine + DIM;
    Token token(s, mine, k, mine + 2 * DIM, parts, gates, l2_eps, scale, warp, lane, [] { __syncthreads(); });
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      s[r] = token.updated(s[r], k, warp * LINES + r, gates);
      if (target >= 0) *(float4*)(matrix + target * STATE + r * DIM) = s[r];
    }
    if (warp == 0)
      token.store(out + ((first + i) * N_VALUE + head) * DIM, row + CHANNELS + head * DIM, norm, gates, norm_eps, lane);
  }
#if HEADS > 1
  arrive_in_cluster();
  wait_for_cluster();
#endif
  if (n_moved == 0) return;
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    int c = threadIdx.x + m * THREADS;
    if (c >= 3 * DIM || (rank > 0 && c < 2 * DIM)) continue;
    float moved[TAPS];
#pragma unroll
    for (int t = 1; t < TAPS; t++) moved[t] = given.at(n_moved - 1, TAPS - 1 - t, channel[m]);
#pragma unroll
    for (int t = 1; t < TAPS; t++) conv_states[(state * (TAPS - 1) + t - 1) * CHANNELS + channel[m]] = moved[t];
  }
}
