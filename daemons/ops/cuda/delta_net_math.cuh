// What the kernels of the gated delta net share: four columns of a row of a state S [128, 128], gates and sums over a warp.
#pragma once

#include "activations.cuh"

constexpr int DIM = 128, N_VALUE = N_KEY * HEADS, CHANNELS = (2 * N_KEY + N_VALUE) * DIM;
constexpr int UPDATE_WIDTH = (N_KEY + N_VALUE) * DIM + (N_VALUE + 3) / 4 * 4;  // of a token: keys, errors, decays
constexpr int SIDE = 32, TEAM = DIM / SIDE, LINES = 8;  // of a warp's tile; warps that have all rows of its columns; rows of a lane

DEVICE float4 operator*(const float4& a, float b) { return make_float4(a.x * b, a.y * b, a.z * b, a.w * b); }
DEVICE float4 operator+(const float4& a, const float4& b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
// With one rounding of the sum, as the same is computed from an update.
DEVICE float4 multiply_add(const float4& a, float b, const float4& c) {
  return make_float4(fmaf(a.x, b, c.x), fmaf(a.y, b, c.y), fmaf(a.z, b, c.z), fmaf(a.w, b, c.w));
}
DEVICE float dot(const float4& a, const float4& b) { return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w); }

DEVICE float sum_of_warp(float v) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
  return v;
}

DEVICE float sigmoid(float x) { return reciprocal(1.f + expf(-x)); }
DEVICE float number(const u16* y) { return from_activation(*y); }

// What a state is multiplied by before a token is added, and how much of the token is.
struct Gates {
  float decay, beta;
};

// row: the token's [CHANNELS] inputs of the convolution, [N_VALUE DIM] gates of the output, then two gates of each value head
DEVICE Gates gates_of(const u16* row, int head, float rate, float bias) {
  float alpha = number(row + CHANNELS + N_VALUE * DIM + head) + bias;
  return {expf((alpha > 20.f ? alpha : log1pf(expf(alpha))) * rate), sigmoid(number(row + CHANNELS + N_VALUE * (DIM + 1) + head))};
}

// What a token adds to a state and takes from it: the factors of its head's state and of the update, and the product of q and k.
struct Factors {
  float decay, beta, both, unused;
};

// Of one warp: q and k [DIM] in shared memory get their l2 norms, and q the rule's 1 / sqrt(DIM).  Returns their product.
DEVICE float normalise(float* q, float* k, float l2_eps, float scale, int lane) {
  float4 my_q = *(const float4*)(q + lane * 4), my_k = *(const float4*)(k + lane * 4);
  float of_q = rsqrtf(sum_of_warp(dot(my_q, my_q)) / DIM + l2_eps) * (scale * scale);
  float of_k = rsqrtf(sum_of_warp(dot(my_k, my_k)) / DIM + l2_eps) * scale;
  *(float4*)(q + lane * 4) = my_q * of_q;
  *(float4*)(k + lane * 4) = my_k * of_k;
  return sum_of_warp(dot(my_q, my_k)) * of_q * of_k;
}

// Where a warp's TILES tiles of a state lie, or of WIDTH columns of it: those of its team of TEAM warps have the same columns.
// Lane 8 g + c has rows 8 g to 8 g + 7 of a tile, columns 4 c to 4 c + 3.
template <int TILES, int WIDTH> struct Place {
  int row, column, part;  // the lane's first row and column; which of its team's parts the warp adds

  DEVICE Place(int warp, int lane) : row(warp % TEAM * SIDE + lane / 8 * LINES), column(warp / TEAM * SIDE + lane % 8 * 4), part(warp % TEAM) {}

  // Columns from the first one on of tile t
  static DEVICE int columns(int t) { return t * (WIDTH / TILES); }
};

DEVICE void load_lines(float (&lines)[LINES], const float* x) {
  float4 a = *(const float4*)x, b = *(const float4*)(x + 4);
  lines[0] = a.x, lines[1] = a.y, lines[2] = a.z, lines[3] = a.w, lines[4] = b.x, lines[5] = b.y, lines[6] = b.z, lines[7] = b.w;
}

// The rule for one token: `with_q` and `error` of the lane's columns, as all lanes of a team that have them compute.  A column's
// numbers depend neither on TILES nor on WIDTH.
template <int TILES, int WIDTH> struct Token {
  float4 with_q[TILES], error[TILES];
  float k[LINES];

  // s [TILES, LINES]: four columns of each of the lane's rows.  q, k [DIM], v [WIDTH] and parts [TEAM, 2, WIDTH] in shared
  // memory; `meet` waits for the other warps of the team.
  template <class MEET>
  DEVICE Token(const float4 (&s)[TILES][LINES], const float* q_at, const float* k_at, const float* v_at, float* parts,
               const Factors& factors, const Place<TILES, WIDTH>& place, int lane, MEET meet) {
    float q[LINES];
    load_lines(q, q_at + place.row);
    load_lines(k, k_at + place.row);
    bool of_q = lane & 16, upper = lane & 8;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float4 k_sum = {}, q_sum = {};
#pragma unroll
      for (int r = 0; r < LINES; r++) {
        k_sum = k_sum + s[t][r] * k[r];
        q_sum = q_sum + s[t][r] * q[r];
      }
      // The sums over a tile's rows: a lane gives away half of its numbers at each step.
      float4 mine = of_q ? q_sum : k_sum, other = of_q ? k_sum : q_sum;
      mine = mine + make_float4(__shfl_xor_sync(~0u, other.x, 16), __shfl_xor_sync(~0u, other.y, 16),
                                __shfl_xor_sync(~0u, other.z, 16), __shfl_xor_sync(~0u, other.w, 16));
      float2 pair = upper ? make_float2(mine.z, mine.w) : make_float2(mine.x, mine.y);
      float2 given = upper ? make_float2(mine.x, mine.y) : make_float2(mine.z, mine.w);
      pair = make_float2(pair.x + __shfl_xor_sync(~0u, given.x, 8), pair.y + __shfl_xor_sync(~0u, given.y, 8));
      *(float2*)(parts + (place.part * 2 + of_q) * WIDTH + place.column + place.columns(t) + upper * 2) = pair;
    }
    meet();
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      const float* sums = parts + place.column + place.columns(t);
      float4 with_k = {};
      with_q[t] = {};
#pragma unroll
      for (int w = 0; w < TEAM; w++) {
        with_k = with_k + *(const float4*)(sums + w * 2 * WIDTH);
        with_q[t] = with_q[t] + *(const float4*)(sums + (w * 2 + 1) * WIDTH);
      }
      float4 v = *(const float4*)(v_at + place.column + place.columns(t));
      error[t] = (v + with_k * -factors.decay) * factors.beta;
    }
  }

  // The state behind the token
  DEVICE void update(float4 (&s)[TILES][LINES], const Factors& factors) const {
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int r = 0; r < LINES; r++) s[t][r] = multiply_add(error[t], k[r], s[t][r] * factors.decay);
  }

  // The lane's columns of the head's output
  DEVICE float4 output(int t, const Factors& factors) const { return with_q[t] * factors.decay + error[t] * factors.both; }
};

// Of one warp: a head's output, normed with norm [DIM] and gated with z [DIM], of which a lane has four columns.
DEVICE void store_gated(u16* out, float4 o, const u16 (&z)[4], float4 norm, float norm_eps, int lane) {
  o = o * rsqrtf(sum_of_warp(dot(o, o)) / DIM + norm_eps);
  float values[4] = {o.x * norm.x, o.y * norm.y, o.z * norm.z, o.w * norm.w};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    float gate = from_activation(z[c]);
    out[lane * 4 + c] = to_activation(values[c] * (gate * sigmoid(gate)));
  }
}
