// The recurrent gated delta net of short slices: causal convolution, silu, l2 norms, gates, delta rule, gated norm.
//
// A block holds the state S [128, 128] of a value head of a slice in registers: a lane four columns, a warp 128 / WARPS rows.
// HEADS value heads share a key head and form a cluster, so that none writes a convolution window that another still reads.
// Formulas: daemons/ops/triton/recurrent_delta_rule.py, whose sums differ in order only.  S is read before the kernels ahead are
// waited for: between two steps there is a launch that waits for all.  Compiled with HEADS, N_KEY, TAPS of the convolution and WARPS.

#include "activations.cuh"

constexpr int DIM = 128, LINES = DIM / WARPS, N_VALUE = N_KEY * HEADS, CHANNELS = (2 * N_KEY + N_VALUE) * DIM;
constexpr int THREADS = WARPS * 32, MINE = (3 * DIM + THREADS - 1) / THREADS;

DEVICE float4 operator*(const float4& a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
DEVICE float4 operator+(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
DEVICE float dot(const float4& a, const float4& b) { return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w); }

DEVICE float sum_of_warp(float v) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
  return v;
}

DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
DEVICE float number(const u16* y) { return from_activation(*y); }

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
    float alpha = number(row + CHANNELS + N_VALUE * DIM + head) + bias, beta = sigmoid(number(row + CHANNELS + N_VALUE * (DIM + 1) + head));
    float decay = expf((alpha > 20.f ? alpha : log1pf(expf(alpha))) * rate);
    __syncthreads();
    float4 q = *(const float4*)(mine + lane * 4), k = *(const float4*)(mine + DIM + lane * 4);
    float q_scale = rsqrtf(sum_of_warp(dot(q, q)) / DIM + l2_eps) * (scale * scale);
    float k_scale = rsqrtf(sum_of_warp(dot(k, k)) / DIM + l2_eps) * scale;
    float both = sum_of_warp(dot(q, k)) * q_scale * k_scale;
    float4 with_k = {}, with_q = {};
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      with_k = with_k + s[r] * (mine[DIM + warp * LINES + r] * k_scale);
      with_q = with_q + s[r] * (mine[warp * LINES + r] * q_scale);
    }
    *(float4*)(parts + warp * 2 * DIM + lane * 4) = with_k;
    *(float4*)(parts + warp * 2 * DIM + DIM + lane * 4) = with_q;
    __syncthreads();
    with_k = with_q = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      with_k = with_k + *(const float4*)(parts + w * 2 * DIM + lane * 4);
      with_q = with_q + *(const float4*)(parts + w * 2 * DIM + DIM + lane * 4);
    }
    float4 error = (*(const float4*)(mine + 2 * DIM + lane * 4) + with_k * -decay) * beta;
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      s[r] = s[r] * decay + error * (mine[DIM + warp * LINES + r] * k_scale);
      if (target >= 0) *(float4*)(matrix + target * STATE + r * DIM) = s[r];
    }
    if (warp == 0) {
      float4 o = with_q * decay + error * both;
      o = o * rsqrtf(sum_of_warp(dot(o, o)) / DIM + norm_eps);
      float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float z = number(row + CHANNELS + head * DIM + lane * 4 + c);
        float value = values[c] * norm[lane * 4 + c] * (z * sigmoid(z));
        out[((first + i) * N_VALUE + head) * DIM + lane * 4 + c] = to_activation(value);
      }
    }
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
