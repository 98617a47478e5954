// What the kernels of the gated delta net share: four columns of a line of a state S [128, 128], gates and sums over a warp.
#pragma once

#include "activations.cuh"

constexpr int DIM = 128, N_VALUE = N_KEY * HEADS, CHANNELS = (2 * N_KEY + N_VALUE) * DIM, LINES = DIM / WARPS;

DEVICE float2 operator*(const float2& a, float b) { return make_float2(a.x * b, a.y * b); }
DEVICE float2 operator+(const float2& a, const float2& b) { return make_float2(a.x + b.x, a.y + b.y); }
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

// What a state is multiplied by before a token is added, and how much of the token is.
struct Gates {
  float decay, beta;
};

// row: the token's [CHANNELS] inputs of the convolution, [N_VALUE DIM] gates of the output, then two gates of each value head
DEVICE Gates gates_of(const u16* row, int head, float rate, float bias) {
  float alpha = number(row + CHANNELS + N_VALUE * DIM + head) + bias;
  return {expf((alpha > 20.f ? alpha : log1pf(expf(alpha))) * rate), sigmoid(number(row + CHANNELS + N_VALUE * (DIM + 1) + head))};
}

// What a token's q and k are multiplied by, and the product of both: l2 norms, and the rule's 1 / sqrt(DIM) in q.
struct Scales {
  float q, k, both;
};

// Of one warp; q, k [DIM] in shared memory.
DEVICE Scales scales_of(const float* q, const float* k, float l2_eps, float scale, int lane) {
  float4 my_q = *(const float4*)(q + lane * 4), my_k = *(const float4*)(k + lane * 4);
  float of_q = rsqrtf(sum_of_warp(dot(my_q, my_q)) / DIM + l2_eps) * (scale * scale);
  float of_k = rsqrtf(sum_of_warp(dot(my_k, my_k)) / DIM + l2_eps) * scale;
  return {of_q, of_k, sum_of_warp(dot(my_q, my_k)) * of_q * of_k};
}

// A warp's LINES of a vector [DIM] in shared memory, times a scale
DEVICE void load_lines(float (&lines)[LINES], const float* x, float scale, int warp) {
#pragma unroll
  for (int r = 0; r < LINES; r += 4) {
    float4 four = *(const float4*)(x + warp * LINES + r) * scale;
    lines[r] = four.x, lines[r + 1] = four.y, lines[r + 2] = four.z, lines[r + 3] = four.w;
  }
}

// The rule for one token: a block's or team's WARPS warps have LINES lines each of a state in registers, or of half its columns,
// and a lane those of a V: float4 or float2.  A column's numbers do not depend on which.
template <class V> struct Token {
  static constexpr int MINE = sizeof(V) / 4, WIDTH = 32 * MINE;
  V with_q, error;

  // q, k [DIM], v [WIDTH] and parts [WARPS, 2, WIDTH] in shared memory; `meet` waits for the other warps.
  template <class MEET>
  DEVICE Token(const V (&s)[LINES], const float* q_at, const float* k_at, const float* v_at, float* parts, const Gates& gates,
               const Scales& scales, int warp, int lane, MEET meet) {
    float q[LINES], k[LINES];
    load_lines(q, q_at, scales.q, warp);
    load_lines(k, k_at, scales.k, warp);
    V with_k = {};
    with_q = {};
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      with_k = with_k + s[r] * k[r];
      with_q = with_q + s[r] * q[r];
    }
    *(V*)(parts + warp * 2 * WIDTH + lane * MINE) = with_k;
    *(V*)(parts + warp * 2 * WIDTH + WIDTH + lane * MINE) = with_q;
    meet();
    with_k = with_q = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      with_k = with_k + *(const V*)(parts + w * 2 * WIDTH + lane * MINE);
      with_q = with_q + *(const V*)(parts + w * 2 * WIDTH + WIDTH + lane * MINE);
    }
    error = (*(const V*)(v_at + lane * MINE) + with_k * -gates.decay) * gates.beta;
  }

  // A line of the state behind the token; k: its number of the scaled vector.
  DEVICE V updated(const V& s, float k, const Gates& gates) const { return s * gates.decay + error * k; }

  // This lane's columns of the head's output
  DEVICE V output(const Gates& gates, const Scales& scales) const { return with_q * gates.decay + error * scales.both; }
};

// Of one warp: a head's output, normed and gated with z [DIM].
DEVICE void store_gated(u16* out, float4 o, const u16* z, const float* norm, float norm_eps, int lane) {
  o = o * rsqrtf(sum_of_warp(dot(o, o)) / DIM + norm_eps);
  float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    float gate = number(z + lane * 4 + c);
    out[lane * 4 + c] = to_activation(values[c] * norm[lane * 4 + c] * (gate * sigmoid(gate)));
  }
}
