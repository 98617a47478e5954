// The recurrent gated delta net of short slices: causal convolution, silu, l2 norms, gates, delta rule, gated norm.
//
// A block holds WIDTH columns, all or half of them, of the state S [128, 128] of a value head of a slice in registers: a warp has
// TILES tiles of 32 rows and columns, and the four warps that have the same columns add their sums.  The value heads of a key head
// form a cluster, so that none writes a convolution window that another still reads; blocks of a head send each other their columns
// of its outputs, and a copy is awaited where a barrier of the cluster would wait for all states to be written.
// Formulas: daemons/ops/triton/recurrent_delta_rule.py, whose sums differ in order only.  S and windows are read before the kernels
// ahead are waited for: between two steps there is a launch that waits for all.  Whatever does not depend on S is computed for
// all tokens before the first one.  Of tokens that all have a row to write, a block writes what they do to S (k, error, decay)
// instead of S, which would take longer than to compute it.  Compiled with HEADS, N_KEY, TAPS of the convolution, WARPS and HALVES of
// a state, BLOCKS_EACH of a multiprocessor.

#include "delta_net_math.cuh"

constexpr int WIDTH = DIM / HALVES, ROW = 2 * DIM + WIDTH, CLUSTER = HEADS * HALVES, THREADS = WARPS * 32;
constexpr int WIDEST = BLOCKS_EACH == 1 ? 16 : 8;  // tokens whose convolutions registers have room for at once
constexpr int TILES = WIDTH / SIDE * TEAM / WARPS, MINE = (ROW + THREADS - 1) / THREADS, MAX_TOKENS = 16;
constexpr int OUTPUTS = (MAX_TOKENS + HALVES * WARPS - 1) / (HALVES * WARPS);
static_assert(TILES >= 1 && CLUSTER > 1);

// What a block keeps in shared memory, in this order
struct Shared {
  float* parts;      // [2, TEAM, 2, WIDTH]: sums of S with k and with q
  float* inputs;     // [n, ROW]: q, k and the block's columns of v of each token
  float* outputs;    // [n / HALVES, DIM]: of every other token, or of each
  Factors* factors;  // [n]
  u32 received;      // a barrier: outputs are there
  int* targets;      // [MAX_TOKENS]: rows that get the states after tokens, or -1

  DEVICE Shared(u8* start, int n) {
    parts = (float*)start;
    inputs = parts + 2 * TEAM * 2 * WIDTH;
    outputs = inputs + n * ROW;
    factors = (Factors*)(outputs + (n + HALVES - 1) / HALVES * DIM);
    received = shared_address(factors + n);
    targets = (int*)((u8*)(factors + n) + 8);
  }
};

// The convolutions of a thread: of up to MINE of the block's channels
struct Channels {
  int channel[MINE];  // 0 where there is none
  bool there[MINE], written[MINE];  // `written`: its windows are, as other blocks of the cluster have no part in it
  float tap[MINE][TAPS], window[MINE][TAPS - 1], moved[MINE][TAPS - 1];  // inputs of the last tokens; what replaces the slice's own window
  bool any_moved;

  DEVICE Channels(int key, int head, int half, int rank, const float* weight, const float* windows) : any_moved(false) {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
      int c = threadIdx.x + m * THREADS;
      channel[m] = c < DIM ? key * DIM + c : c < 2 * DIM ? N_KEY * DIM + key * DIM + c - DIM : (2 * N_KEY + head) * DIM + half * WIDTH + c - 2 * DIM;
      there[m] = c < ROW;
      written[m] = c < ROW && (rank == 0 || c >= 2 * DIM);
      if (!there[m]) channel[m] = 0;
#pragma unroll
      for (int t = 0; t < TAPS; t++) tap[m][t] = weight[t * CHANNELS + channel[m]];
#pragma unroll
      for (int t = 0; t < TAPS - 1; t++) window[m][t] = windows[t * CHANNELS + channel[m]], moved[m][t] = 0.f;
    }
  }

  // Tokens [0, n), AT_ONCE at once: independent sums in a row, then what is stored.
  template <int AT_ONCE> DEVICE void convolve(const Shared& shared, int n, int state, const u16* rows, int y_stride, float* conv_states) {
    for (int from = 0; from < n; from += AT_ONCE) {
      u16 raw[MINE][AT_ONCE];
#pragma unroll
      for (int m = 0; m < MINE; m++)
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) raw[m][a] = rows[min(from + a, n - 1) * y_stride + channel[m]];
#pragma unroll
      for (int m = 0; m < MINE; m++) {
        if (!there[m]) break;  // all lanes of a warp
        float in[TAPS - 1 + AT_ONCE], x[AT_ONCE];
#pragma unroll
        for (int t = 0; t < TAPS - 1; t++) in[t] = window[m][t];
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) in[TAPS - 1 + a] = from_activation(raw[m][a]);
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) {
          x[a] = 0.f;
#pragma unroll
          for (int t = 0; t < TAPS; t++) x[a] += in[a + t] * tap[m][t];
          x[a] *= sigmoid(x[a]);
        }
        float* mine = shared.inputs + from * ROW + threadIdx.x + m * THREADS;
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++)
          if (from + a < n) mine[a * ROW] = x[a];
#pragma unroll
        for (int a = 0; a < AT_ONCE; a++) {
          int target = shared.targets[from + a];
          bool own = target == state, other = target >= 0 && !own && written[m];
          float* windows = conv_states + (long long)target * ((TAPS - 1) * CHANNELS) + channel[m];
          any_moved |= own;
#pragma unroll
          for (int t = 0; t < TAPS - 1; t++) {
            if (other) windows[t * CHANNELS] = in[a + 1 + t];
            moved[m][t] = own ? in[a + 1 + t] : moved[m][t];
          }
        }
#pragma unroll
        for (int t = 0; t < TAPS - 1; t++) window[m][t] = in[AT_ONCE + t];
      }
    }
  }

  DEVICE void move_window(float* windows) const {
#pragma unroll
    for (int m = 0; m < MINE; m++)
#pragma unroll
      for (int t = 0; t < TAPS - 1; t++)
        if (any_moved && written[m]) windows[t * CHANNELS + channel[m]] = moved[m][t];
  }
};

// Grid (N_VALUE HALVES, slices).  y [slices n, columns] with y_stride from row to row; out [slices n, N_VALUE DIM]; pools conv_states
// [states, TAPS - 1, CHANNELS] and states [states, N_VALUE, DIM, DIM]; ids [slices]; kept [slices, n]: the row that gets the state after
// each token, or -1; updates [states, UPDATE_WIDTH]: rows of several tokens get their updates there, if the first one has a row.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS_EACH)
    delta_net(const u16* y, u16* out, float* conv_states, float* states, float* updates, const long long* ids, const long long* kept,
              const float* __restrict__ conv_weight, const float* __restrict__ decay_rates, const float* __restrict__ dt_bias,
              const float* __restrict__ norm, int n, int y_stride, float norm_eps, float l2_eps, float scale) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = (int)blockIdx.x % CLUSTER, key = (int)blockIdx.x / CLUSTER;
  int half = rank % HALVES, head = rank / HALVES * N_KEY + key, n_outputs = (n - half + HALVES - 1) / HALVES;
  Shared shared(memory, n);
  long long state = ids[blockIdx.y], first = (long long)blockIdx.y * n;
  Place<TILES, WIDTH> place(warp, lane);
  constexpr long long STATE = (long long)N_VALUE * DIM * DIM;
  float* matrix = states + (head * DIM + place.row) * DIM + half * WIDTH + place.column;
  float4 s[TILES][LINES];
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int r = 0; r < LINES; r++) s[t][r] = *(const float4*)(matrix + state * STATE + r * DIM + place.columns(t));
  float* own_windows = conv_states + state * ((TAPS - 1) * CHANNELS);
  Channels channels(key, head, half, rank, conv_weight, own_windows);
  float rate = decay_rates[head], bias = dt_bias[head];
  float4 norm_of_lane = *(const float4*)(norm + lane * 4);
  if (threadIdx.x < MAX_TOKENS) shared.targets[threadIdx.x] = threadIdx.x < n ? (int)kept[first + threadIdx.x] : -1;
  if (threadIdx.x == 0 && n_outputs) {
    init_barrier(shared.received);
    publish_barriers();
    expect_bytes(shared.received, n_outputs * DIM * 4);
  }
  __syncthreads();
  wait_for_inputs();
  const u16* rows = y + first * y_stride;
  u16 z[OUTPUTS][4];  // of the outputs that the warp will norm
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++) {
    int i = (warp + o * WARPS) * HALVES + half;
#pragma unroll
    for (int c = 0; c < 4; c++) z[o][c] = i < n ? rows[(long long)i * y_stride + CHANNELS + head * DIM + lane * 4 + c] : 0;
  }
  if (warp == WARPS - 1 && lane < n) {  // it has fewer channels than the first ones
    Gates gates = gates_of(rows + (long long)lane * y_stride, head, rate, bias);
    shared.factors[lane].decay = gates.decay, shared.factors[lane].beta = gates.beta;
  }
  if (n == 1) channels.convolve<1>(shared, n, (int)state, rows, y_stride, conv_states);
  else if (n <= 4) channels.convolve<4>(shared, n, (int)state, rows, y_stride, conv_states);
  else if (n <= 8 || WIDEST == 8) channels.convolve<8>(shared, n, (int)state, rows, y_stride, conv_states);
  else channels.convolve<WIDEST>(shared, n, (int)state, rows, y_stride, conv_states);
  arrive_in_cluster_relaxed();  // the window was read: its numbers were multiplied
  __syncthreads();
  bool keeps_updates = n > 1 && shared.targets[0] >= 0;
  for (int i = warp; i < n; i += WARPS) {
    float* q = shared.inputs + i * ROW;
    float both = normalise(q, q + DIM, l2_eps, scale, lane);
    if (lane == 0) shared.factors[i].both = both;
    if (!keeps_updates || shared.targets[i] < 0) continue;
    float* update = updates + (long long)shared.targets[i] * UPDATE_WIDTH;
    if (rank == 0) *(float4*)(update + key * DIM + lane * 4) = *(const float4*)(q + DIM + lane * 4);
    if (half == 0 && lane == 0) update[(N_KEY + N_VALUE) * DIM + head] = shared.factors[i].decay;
  }
  __syncthreads();
  wait_for_cluster();
  channels.move_window(own_windows);
  for (int i = 0; i < n; i++) {
    const float* q = shared.inputs + i * ROW;
    float* parts = shared.parts + i % 2 * (TEAM * 2 * WIDTH);  // two, so that one barrier is enough
    Factors factors = shared.factors[i];
    Token<TILES, WIDTH> token(s, q, q + DIM, q + 2 * DIM, parts, factors, place, lane, [=] { wait_for_team<TEAM * 32>(warp / TEAM); });
    token.update(s, factors);
    if (warp % TEAM == i % TEAM && lane < 8) {
      float* output = shared.outputs + i / HALVES * DIM + half * WIDTH + place.column;
#pragma unroll
      for (int t = 0; t < TILES; t++)
        send_in_cluster(shared_address(output + place.columns(t)), rank - half + i % HALVES, token.output(t, factors), shared.received);
    }
    long long target = shared.targets[i];
    if (target < 0) continue;
    if (!keeps_updates) {
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int r = 0; r < LINES; r++) *(float4*)(matrix + target * STATE + r * DIM + place.columns(t)) = s[t][r];
    } else if (warp % TEAM == (i + 1) % TEAM && lane < 8) {
      float* errors = updates + target * UPDATE_WIDTH + (N_KEY + head) * DIM + half * WIDTH + place.column;
#pragma unroll
      for (int t = 0; t < TILES; t++) *(float4*)(errors + place.columns(t)) = token.error[t];
    }
  }
  if (n_outputs) wait_for_barrier(shared.received, 0);
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++) {
    int at = warp + o * WARPS;
    if (at >= n_outputs) break;
    float4 output = *(const float4*)(shared.outputs + at * DIM + lane * 4);
    store_gated(out + ((first + at * HALVES + half) * N_VALUE + head) * DIM, output, z[o], norm_of_lane, norm_eps, lane);
  }
}
