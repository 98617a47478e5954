// What the kernels of the gated delta net share: four columns of a line of a state S [128, 128], gates and sums over a warp.
#pragma once

#include "activations.cuh"

constexpr int DIM = 128, N_VALUE = N_KEY * HEADS, CHANNELS = (2 * N_KEY + N_VALUE) * DIM, LINES = DIM / WARPS;

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

// The rule for one token: a block's or team's WARPS warps have LINES lines each of a state in registers, a lane four columns.
struct Token {
  float q_scale, k_scale, both;
  float4 with_q, error;

  // q, k, v [DIM] and parts [WARPS, 2, DIM] in shared memory; `meet` waits for the other warps.
  template <class MEET>
  DEVICE Token(const float4 (&s)[LINES], const float* q, const float* k, const float* v, float* parts, const Gates& gates, float l2_eps,
               float scale, int warp, int lane, MEET meet) {
    float4 my_q = *(const float4*)(q + lane * 4), my_k = *(const float4*)(k + lane * 4);
    q_scale = rsqrtf(sum_of_warp(dot(my_q, my_q)) / DIM + l2_eps) * (scale * scale);
    k_scale = rsqrtf(sum_of_warp(dot(my_k, my_k)) / DIM + l2_eps) * scale;
    both = sum_of_warp(dot(my_q, my_k)) * q_scale * k_scale;
    float4 with_k = {};
    with_q = {};
#pragma unroll
    for (int r = 0; r < LINES; r++) {
      with_k = with_k + s[r] * (k[warp * LINES + r] * k_scale);
      with_q = with_q + s[r] * (q[warp * LINES + r] * q_scale);
    }
    *(float4*)(parts + warp * 2 * DIM + lane * 4) = with_k;
    *(float4*)(parts + warp * 2 * DIM + DIM + lane * 4) = with_q;
    meet();
    with_k = with_q = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      with_k = with_k + *(const float4*)(parts + w * 2 * DIM + lane * 4);
      with_q = with_q + *(const float4*)(parts + w * 2 * DIM + DIM + lane * 4);
    }
    error = (*(const float4*)(v + lane * 4) + with_k * -gates.decay) * gates.beta;
  }

  // Line `line` of the state behind the token.
  DEVICE float4 updated(const float4& s, const float* k, int line, const Gates& gates) const {
    return s * gates.decay + error * (k[line] * k_scale);
  }

  // Of one warp: the head's output, normed and gated with z [DIM].
  DEVICE void store(u16* out, const u16* z, const float* norm, const Gates& gates, float norm_eps, int lane) const {
    float4 o = with_q * gates.decay + error * both;
    o = o * rsqrtf(sum_of_warp(dot(o, o)) / DIM + norm_eps);
    float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
    for (int c = 0; c < 4; c++) {
      float gate = number(z + lane * 4 + c);
      out[lane * 4 + c] = to_activation(values[c] * norm[lane * 4 + c] * (gate * sigmoid(gate)));
    }
  }
};
