// The recurrent gated delta net of short slices: causal convolution, silu, l2 norms, gates, delta rule, gated norm.
//
// A block holds WIDTH columns, all or half of them, of the state S [128, 128] of a value head of a slice in registers: a warp 128 / WARPS
// rows, a lane four or two columns.  More blocks write the states after each token faster: a multiprocessor writes few bytes a cycle.
// HEADS value heads share a key head and form a cluster, so that none writes a convolution window that another still reads.
// Formulas: daemons/ops/triton/recurrent_delta_rule.py, whose sums differ in order only.  S is read before the kernels ahead are
// waited for: between two steps there is a launch that waits for all.  Whatever does not depend on S is computed for all tokens
// before the first one: then a token waits for nothing but shared memory.  Compiled with HEADS, N_KEY, TAPS of the convolution,
// WARPS and HALVES of a state.

#include "delta_net_math.cuh"

constexpr int WIDTH = DIM / HALVES, COLUMNS = WIDTH / 32, ROW = 2 * DIM + WIDTH, CLUSTER = HEADS * HALVES;
constexpr int THREADS = WARPS * 32, MINE = (ROW + THREADS - 1) / THREADS, AT_ONCE = 8;

template <int> struct Columns { typedef float4 Type; };
template <> struct Columns<2> { typedef float2 Type; };
typedef Columns<COLUMNS>::Type Line;

// What a block keeps in shared memory, in this order
struct Shared {
  float* parts;    // [2, WARPS, 2, WIDTH]: sums of S with k and with q
  float* inputs;   // [n, ROW]: q, k and the block's columns of v of each token; an output takes its q's place
  Scales* scales;  // [n]
  Gates* gates;    // [n]

  DEVICE Shared(u8* start, int n) {
    parts = (float*)start;
    inputs = parts + 2 * WARPS * 2 * WIDTH;
    scales = (Scales*)(inputs + n * ROW);
    gates = (Gates*)(scales + n);
  }
};

// All threads of a cluster meet, or those of a block that is alone.
DEVICE void meet_cluster() {
#if HEADS * HALVES > 1
  arrive_in_cluster();
  wait_for_cluster();
#else
  __syncthreads();
#endif
}

// Four columns of an output, from column `lane` * 4 on: of this block or of its cluster's with the other half
DEVICE float4 load_output(const float* mine, int rank, int half, int lane) {
#if HALVES > 1
  return load_from_cluster(shared_address(mine + lane * 4 % WIDTH), rank - half + lane * 4 / WIDTH);
#else
  return *(const float4*)(mine + lane * 4);
#endif
}

// Grid (N_VALUE HALVES, slices).  y [slices n, columns] with y_stride from row to row; out [slices n, N_VALUE DIM]; pools conv_states
// [states, TAPS - 1, CHANNELS] and states [states, N_VALUE, DIM, DIM]; ids [slices]; kept [slices, n]: the row that gets the state after
// each token, or -1.
extern "C" __global__ void
#if HEADS * HALVES > 1
    __cluster_dims__(HEADS * HALVES, 1, 1)
#endif
        __launch_bounds__(THREADS, 2)
            delta_net(const u16* y, u16* out, float* conv_states, float* states, const long long* __restrict__ ids,
                      const long long* __restrict__ kept, const float* __restrict__ conv_weight, const float* __restrict__ decay_rates,
                      const float* __restrict__ dt_bias, const float* __restrict__ norm, int n, int y_stride, float norm_eps, float l2_eps,
                      float scale) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = (int)blockIdx.x % CLUSTER, key = (int)blockIdx.x / CLUSTER;
  int half = rank % HALVES, head = rank / HALVES * N_KEY + key;
  Shared shared(memory, n);
  long long state = ids[blockIdx.y], first = (long long)blockIdx.y * n;
  float* matrix = states + (head * DIM + warp * LINES) * DIM + half * WIDTH + lane * COLUMNS;
  constexpr long long STATE = (long long)N_VALUE * DIM * DIM;
  Line s[LINES];
#pragma unroll
  for (int r = 0; r < LINES; r++) s[r] = *(const Line*)(matrix + state * STATE + r * DIM);
  int channel[MINE];
  bool writes[MINE];  // a window's channel, in which other blocks of the cluster have no part
  float tap[MINE][TAPS];
#pragma unroll
  for (int m = 0; m < MINE; m++) {
    int c = threadIdx.x + m * THREADS;
    channel[m] = c < DIM ? key * DIM + c : c < 2 * DIM ? N_KEY * DIM + key * DIM + c - DIM : (2 * N_KEY + head) * DIM + half * WIDTH + c - 2 * DIM;
    writes[m] = c < ROW && (rank == 0 || c >= 2 * DIM);
#pragma unroll
    for (int t = 0; t < TAPS; t++) tap[m][t] = c < ROW ? conv_weight[t * CHANNELS + channel[m]] : 0.f;
  }
  float rate = decay_rates[head], bias = dt_bias[head];
  wait_for_inputs();
  const u16* rows = y + first * y_stride;
  if (threadIdx.x < n) shared.gates[threadIdx.x] = gates_of(rows + (long long)threadIdx.x * y_stride, head, rate, bias);
  float* window = conv_states + state * (TAPS - 1) * CHANNELS;
  float recent[MINE][TAPS], moved[MINE][TAPS - 1];  // inputs of the last tokens, the newest one last; what replaces the slice's own window
  int n_moved = 0;
#pragma unroll
  for (int m = 0; m < MINE; m++)
#pragma unroll
    for (int t = 1; t < TAPS; t++)
      recent[m][t] = threadIdx.x + m * THREADS < ROW ? window[(t - 1) * CHANNELS + channel[m]] : 0.f;
  for (int from = 0; from < n; from += AT_ONCE) {
    u16 in[MINE][AT_ONCE];
#pragma unroll
    for (int m = 0; m < MINE; m++)
#pragma unroll
      for (int a = 0; a < AT_ONCE; a++)
        in[m][a] = threadIdx.x + m * THREADS < ROW && from + a < n ? rows[(long long)(from + a) * y_stride + channel[m]] : 0;
#pragma unroll
    for (int a = 0; a < AT_ONCE; a++) {
      int i = from + a;
      if (i >= n) break;
      long long target = kept[first + i];
      if (target == state) n_moved = i + 1;
#pragma unroll
      for (int m = 0; m < MINE; m++) {
        float x = 0.f;
#pragma unroll
        for (int t = 0; t < TAPS; t++) {
          recent[m][t] = t < TAPS - 1 ? recent[m][t + 1] : from_activation(in[m][a]);
          x += recent[m][t] * tap[m][t];
          if (t > 0 && target == state) moved[m][t - 1] = recent[m][t];
          if (t > 0 && target >= 0 && target != state && writes[m])
            conv_states[(target * (TAPS - 1) + t - 1) * CHANNELS + channel[m]] = recent[m][t];
        }
        if (threadIdx.x + m * THREADS < ROW) shared.inputs[i * ROW + threadIdx.x + m * THREADS] = x * sigmoid(x);
      }
    }
  }
  __syncthreads();
  Scales scales;
  if (n == 1) {
    scales = scales_of(shared.inputs, shared.inputs + DIM, l2_eps, scale, lane);
  } else {
    for (int i = warp; i < n; i += WARPS) {
      const float* q = shared.inputs + i * ROW;
      scales = scales_of(q, q + DIM, l2_eps, scale, lane);
      if (lane == 0) shared.scales[i] = scales;
    }
    __syncthreads();
  }
  for (int i = 0; i < n; i++) {
    float* q = shared.inputs + i * ROW;
    float* parts = shared.parts + i % 2 * (WARPS * 2 * WIDTH);  // two, so that one barrier is enough
    Gates gates = shared.gates[i];
    if (n > 1) scales = shared.scales[i];
    Token<Line> token(s, q, q + DIM, q + 2 * DIM, parts, gates, scales, warp, lane, [] { __syncthreads(); });
    long long target = kept[first + i];
    float k[LINES];  // loaded again: holding them costs registers
    load_lines(k, q + DIM, scales.k, warp);
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      s[r] = token.updated(s[r], k[r], gates);
      if (target >= 0) *(Line*)(matrix + target * STATE + r * DIM) = s[r];
    }
    if (warp == i % WARPS) *(Line*)(q + lane * COLUMNS) = token.output(gates, scales);
  }
  meet_cluster();  // outputs are there, and all have read the window
  for (int i = half + warp * HALVES; i < n; i += WARPS * HALVES) {
    float4 o = load_output(shared.inputs + i * ROW, rank, half, lane);
    store_gated(out + ((first + i) * N_VALUE + head) * DIM, o, rows + (long long)i * y_stride + CHANNELS + head * DIM, norm, norm_eps, lane);
  }
#pragma unroll
  for (int m = 0; m < MINE; m++)
#pragma unroll
    for (int t = 1; t < TAPS; t++)
      if (n_moved && writes[m]) window[(t - 1) * CHANNELS + channel[m]] = moved[m][t - 1];
#if HALVES > 1
  meet_cluster();  // no block ends whose outputs are still read
#endif
}
