// The recurrent gated delta net of one token of each of many slices (delta_net.cu has it for few slices or several tokens).
//
// A block has pairs of a slice and a key head in turn, and of each its HEADS value heads: an item is one state S [128, 128].
// A warp of its own copies items to a ring in shared memory and back, while TEAMS teams of WARPS warps compute items in turn; so memory
// is read and written all the time, where blocks that hold a state in registers do either at once.  The convolution of all
// pairs comes first.  The numbers are those of delta_net.cu, bit for bit.  States are read before the kernels ahead are waited for, as there.
// Compiled with HEADS, N_KEY, TAPS of the convolution, WARPS, TEAMS and SLOTS of the ring.

#include "delta_net_math.cuh"

constexpr int STATE_BYTES = DIM * DIM * 4, TEAM_THREADS = WARPS * 32, THREADS = TEAMS * TEAM_THREADS, TILES = DIM / SIDE * TEAM / WARPS;
constexpr int PARTS = TEAMS * WARPS / TEAM;  // of the teams, whose warps have the same columns
constexpr int ROW = (2 + HEADS) * DIM;  // q, k and the values of a pair
static_assert(2 * SLOTS % TEAMS == 0);  // a team ended the phase before the one that it waits for

// What a block keeps in shared memory, in this order
struct Shared {
  float* slots;   // [SLOTS] states
  float* parts;   // [TEAMS, TEAM, 2, DIM]: sums of S with k and with q
  float* outputs;  // [TEAMS, 2, DIM]: of two items in turn
  float* inputs;  // [pairs, ROW]
  Factors* factors;  // [pairs, HEADS]
  u32 full, empty;  // barriers [SLOTS]: a state is there; it may be copied back

  DEVICE Shared(u8* start, int n_pairs) {
    slots = (float*)start;
    parts = slots + SLOTS * DIM * DIM;
    outputs = parts + TEAMS * TEAM * 2 * DIM;
    inputs = outputs + TEAMS * 2 * DIM;
    factors = (Factors*)(inputs + n_pairs * ROW);
    full = shared_address(factors + n_pairs * HEADS);
    empty = full + 8 * SLOTS;
  }
};

// The pairs of a block, and the value heads of each
struct Items {
  const long long *ids, *kept;

  DEVICE int pair(int i) const { return (int)blockIdx.x + i / HEADS * (int)gridDim.x; }
  DEVICE int slice(int i) const { return pair(i) / N_KEY; }
  DEVICE int head(int i) const { return i % HEADS * N_KEY + pair(i) % N_KEY; }
  DEVICE long long offset(int i, long long state) const { return (state * N_VALUE + head(i)) * (DIM * DIM); }
};

// Of one thread: all copies of a block
DEVICE void copy_states(const Items& items, int n_items, const Shared& s, float* states) {
  u32 slots = shared_address(s.slots);
  for (int i = 0; i < SLOTS && i < n_items; i++)
    copy_bulk<STATE_BYTES>(slots + i * STATE_BYTES, (const u8*)(states + items.offset(i, items.ids[items.slice(i)])), s.full + 8 * i);
  for (int i = 0; i < n_items; i++) {
    int slot = i % SLOTS, next = i + SLOTS;
    long long target = items.kept[items.slice(i)];
    wait_for_barrier(s.empty + 8 * slot, i / SLOTS % 2);
    if (target >= 0) {
      store_bulk<STATE_BYTES>((u8*)(states + items.offset(i, target)), slots + slot * STATE_BYTES);
      wait_until_stores_have_read();
    }
    if (next < n_items)
      copy_bulk<STATE_BYTES>(slots + slot * STATE_BYTES, (const u8*)(states + items.offset(next, items.ids[items.slice(next)])),
                             s.full + 8 * slot);
  }
  wait_for_stores();
}

// Grid (blocks).  y [n_slices, columns] with y_stride from row to row; out [n_slices, N_VALUE DIM]; pools conv_states [states,
// TAPS - 1, CHANNELS] and states [states, N_VALUE, DIM, DIM]; ids, kept [n_slices]: the row of a slice's state, and the row that
// gets the one behind its token, or -1.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    delta_net_batch(const u16* y, u16* out, float* conv_states, float* states, const long long* ids, const long long* kept,
                    const float* conv_weight, const float* decay_rates, const float* dt_bias, const float* norm, int n_slices,
                    int y_stride, float norm_eps, float l2_eps, float scale) {
  extern __shared__ __align__(128) u8 memory[];
  launch_dependents();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int n_pairs = (n_slices * N_KEY - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, n_items = n_pairs * HEADS;
  Shared s(memory, n_pairs);
  Items items = {ids, kept};
  if (threadIdx.x == THREADS) {
    for (int i = 0; i < SLOTS; i++) {
      init_barrier(s.full + 8 * i);
      init_barrier(s.empty + 8 * i);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp == TEAMS * WARPS) {
    if (lane == 0) copy_states(items, n_items, s, states);
    return;
  }
  wait_for_inputs();
  for (int at = threadIdx.x; at < n_pairs * ROW; at += THREADS) {
    int pair = at / ROW, c = at % ROW, key = items.pair(pair * HEADS) % N_KEY, slice = items.slice(pair * HEADS);
    int channel = (c < DIM ? key : c < 2 * DIM ? N_KEY + key : 2 * N_KEY + (c / DIM - 2) * N_KEY + key) * DIM + c % DIM;
    long long target = kept[slice];
    const float* window = conv_states + ids[slice] * (TAPS - 1) * CHANNELS + channel;
    float in[TAPS], x = 0.f;
#pragma unroll
    for (int t = 0; t < TAPS; t++) in[t] = t < TAPS - 1 ? window[t * CHANNELS] : number(y + (long long)slice * y_stride + channel);
#pragma unroll
    for (int t = 0; t < TAPS; t++) {
      x += in[t] * conv_weight[t * CHANNELS + channel];
      if (t > 0 && target >= 0) conv_states[(target * (TAPS - 1) + t - 1) * CHANNELS + channel] = in[t];
    }
    s.inputs[at] = x * sigmoid(x);
  }
  for (int i = threadIdx.x; i < n_items; i += THREADS) {
    int head = items.head(i);
    Gates gates = gates_of(y + (long long)items.slice(i) * y_stride, head, decay_rates[head], dt_bias[head]);
    s.factors[i].decay = gates.decay, s.factors[i].beta = gates.beta;
  }
  wait_for_team<THREADS>(PARTS);
  for (int pair = warp; pair < n_pairs; pair += TEAMS * WARPS) {
    float* q = s.inputs + pair * ROW;
    float both = normalise(q, q + DIM, l2_eps, scale, lane);
    if (lane < HEADS) s.factors[pair * HEADS + lane].both = both;
  }
  wait_for_team<THREADS>(PARTS);
  int team = warp / WARPS, member = warp % WARPS;
  Place<TILES, DIM> place(member, lane);
  float* parts = s.parts + team * (TEAM * 2 * DIM);
  for (int i = team; i < n_items; i += TEAMS) {
    int slot = i % SLOTS;
    const float *q = s.inputs + i / HEADS * ROW, *k = q + DIM, *v = k + DIM + i % HEADS * DIM;
    float* matrix = s.slots + slot * (DIM * DIM) + place.row * DIM + place.column;
    Factors factors = s.factors[i];
    // Another team had the slot before: while its state is on the way, this one's parity is that of the phase before it.
    if (i >= SLOTS) wait_for_barrier(s.empty + 8 * slot, (i / SLOTS - 1) % 2);
    wait_for_barrier(s.full + 8 * slot, i / SLOTS % 2);
    float4 lines[TILES][LINES];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int r = 0; r < LINES; r++) lines[t][r] = *(const float4*)(matrix + r * DIM + place.columns(t));
    Token<TILES, DIM> token(lines, q, k, v, parts, factors, place, lane, [=] { wait_for_team<TEAM * 32>(warp / TEAM); });
    token.update(lines, factors);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int r = 0; r < LINES; r++) *(float4*)(matrix + r * DIM + place.columns(t)) = lines[t][r];
    float* outputs = s.outputs + (team * 2 + i / TEAMS % 2) * DIM;
    if (place.part == 0 && lane < 8) {
#pragma unroll
      for (int t = 0; t < TILES; t++) *(float4*)(outputs + place.column + place.columns(t)) = token.output(t, factors);
    }
    publish_writes();
    wait_for_team<TEAM_THREADS>(PARTS + 1 + team);
    if (threadIdx.x % TEAM_THREADS == 0) arrive(s.empty + 8 * slot);
    if (member == 0) {
      long long slice = items.slice(i), head = items.head(i);
      const u16* z_at = y + slice * y_stride + CHANNELS + head * DIM + lane * 4;
      u16 z[4] = {z_at[0], z_at[1], z_at[2], z_at[3]};
      store_gated(out + (slice * N_VALUE + head) * DIM, *(const float4*)(outputs + lane * 4), z, *(const float4*)(norm + lane * 4), norm_eps, lane);
    }
  }
}
