// Products of a tile of packed weights, 16 rows x 256 columns (daemons/weights/packed.py), with activations in float16.
//
// Each quant type is a class: BYTES of a tile, LANE: bytes of activations that a lane reads at once, SUMS: whether it needs
// their sums, load() a tile from shared memory to a warp's registers, add() its product.  A lane is 4 g + t and holds parts of rows g and g + 8.  Codes become
// float16 numbers exactly: a code or 16 codes beside the exponent of 1024 is 1024 + code, one fused operation takes 1024 off
// and multiplies by an integer scale where there is one.  The order of columns is the same in both factors, so any will do.
#pragma once

#include "ptx.cuh"

// Where a warp's activations are in shared memory: of a chunk of 256 columns and up to eight rows, columns of the product.
// Those of group j of 32 columns: x + j GROUP, 16 bytes a lane (of group j of 16: x + j GROUP / 2, 8 bytes).
struct Activations {
  u32 x;            // this lane's numbers
  u32 sums;         // of row g over groups 2 t and 2 t + 1: float16 pair; LOW bytes on their rounding errors
  float factors[2]; // what rows 2 t and 2 t + 1 were divided by
};

// How they lie
template <int GROUP_BYTES, int LOW_BYTES> struct Order {
  static constexpr int GROUP = GROUP_BYTES, LOW = LOW_BYTES;
};

constexpr u32 MAGIC = 0x64006400;  // 1024 twice

template <int SHIFT> DEVICE u32 shift_left(u32 a) { return SHIFT >= 0 ? a << SHIFT : a >> -SHIFT; }

// Four words of 4-bit codes, and of fifth bits, of a lane's row for half a chunk
template <bool FIFTH> struct Codes {
  uint4 words[2];
  uint2 high;

  DEVICE void load(u32 codes, u32 high_bits, int lane, int row) {
    words[0] = load_shared16(codes + row * 64 + (lane & 3) * 16);
    words[1] = load_shared16(codes + 1024 + row * 64 + (lane & 3) * 16);
    if (FIFTH) high = load_shared8(high_bits + row * 32 + (lane & 3) * 8);
  }

  // 1024 + code of pair Q of group J, or 1024 + 16 code if J is odd
  template <int J, int Q> DEVICE u32 biased(u32 magic) const {
    const uint4& half = words[J / 4];
    u32 word = Q == 0 ? half.x : Q == 1 ? half.y : Q == 2 ? half.z : half.w;
    constexpr bool ODD = J % 2;
    word >>= (J % 4) / 2 * 8;
    u32 number = ODD ? and_or<0x00F000F0u>(word, magic) : and_or<0x000F000Fu>(word, magic);
    if (FIFTH) {
      u32 bits = __byte_perm(Q < 2 ? high.x : high.y, 0, Q % 2 ? 0x4342 : 0x4140);  // bit j of a code in each half
      number = ODD ? and_or<0x01000100u>(shift_left<8 - J>(bits), number)
                   : and_or<0x00100010u>(shift_left<4 - J>(bits), number);
    }
    return number;
  }
};

// ---- Q4_K, Q5_K: integer scales and minima.  code x scale < 2,048 is exact, so that one product sums the whole chunk.

template <bool FIFTH> struct IntegerScales {
  static constexpr int HIGH = 2048, SCALES = HIGH + (FIFTH ? 512 : 0), BYTES = SCALES + 256;
  static constexpr int LANE = 16;
  static constexpr bool SUMS = true;
  Codes<FIFTH> codes[2];
  uint4 scales[2];
  u32 minima[2];  // the word of two groups whose minima this lane multiplies

  DEVICE void load(u32 at, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = lane / 4 + 8 * r;
      codes[r].load(at, at + HIGH, lane, row);
      scales[r] = load_shared16(at + SCALES + row * 16);
      minima[r] = load_shared4(at + SCALES + row * 16 + (lane & 3) * 4);
    }
  }

  template <class ORDER, int N> DEVICE void add(float (&sum)[N][4], const Activations (&x)[N]) const {
    u32 magic = in_register(MAGIC);
    float even[N][4] = {}, odd[N][4] = {};  // two chains hide the latency of the matrix units
    groups<0, ORDER>(even, odd, x, magic);
    groups<1, ORDER>(even, odd, x, magic);
    groups<2, ORDER>(even, odd, x, magic);
    groups<3, ORDER>(even, odd, x, magic);
    u32 low[2];
#pragma unroll
    for (int r = 0; r < 2; r++) low[r] = add_half2(and_or<0x003F003Fu>(minima[r] >> 6, magic), 0xE400E400u);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float minimum[4] = {};
      mma(minimum, low[0], low[1], low[0], low[1], load_shared4(x[n].sums), load_shared4(x[n].sums + ORDER::LOW));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 d_dmin = d_and_dmin(scales[i / 2]);
        float product = low_float(d_dmin) * (even[n][i] + odd[n][i]) - high_float(d_dmin) * minimum[i];
        sum[n][i] += x[n].factors[i % 2] * product;
      }
    }
  }

 private:
  DEVICE static u32 d_and_dmin(const uint4& s) {
    return ((s.x >> 12) & 0x000F000Fu) | ((s.y >> 8) & 0x00F000F0u) | ((s.z >> 4) & 0x0F000F00u) | (s.w & 0xF000F000u);
  }

  // Groups 2 W and 2 W + 1
  template <int W, class ORDER, int N>
  DEVICE void groups(float (&even)[N][4], float (&odd)[N][4], const Activations (&x)[N], u32 magic) const {
    u32 scale[2], bias[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 word = W == 0 ? scales[r].x : W == 1 ? scales[r].y : W == 2 ? scales[r].z : scales[r].w;
      scale[r] = fma_half2(and_or<0x003F003Fu>(word, magic), 0x2C003C00u, 0xD400E400u);  // even, odd / 16
      bias[r] = mul_half2(scale[r], 0xE400E400u);
    }
    group<2 * W, ORDER>(even, x, both_low(scale[0]), both_low(bias[0]), both_low(scale[1]), both_low(bias[1]), magic);
    group<2 * W + 1, ORDER>(odd, x, both_high(scale[0]), both_high(bias[0]), both_high(scale[1]), both_high(bias[1]), magic);
  }

  template <int J, class ORDER, int N>
  DEVICE void group(float (&c)[N][4], const Activations (&x)[N], u32 scale0, u32 bias0, u32 scale1, u32 bias1, u32 magic) const {
    u32 a0 = fma_half2(codes[0].template biased<J, 0>(magic), scale0, bias0);
    u32 a1 = fma_half2(codes[1].template biased<J, 0>(magic), scale1, bias1);
    u32 a2 = fma_half2(codes[0].template biased<J, 1>(magic), scale0, bias0);
    u32 a3 = fma_half2(codes[1].template biased<J, 1>(magic), scale1, bias1);
    u32 a4 = fma_half2(codes[0].template biased<J, 2>(magic), scale0, bias0);
    u32 a5 = fma_half2(codes[1].template biased<J, 2>(magic), scale1, bias1);
    u32 a6 = fma_half2(codes[0].template biased<J, 3>(magic), scale0, bias0);
    u32 a7 = fma_half2(codes[1].template biased<J, 3>(magic), scale1, bias1);
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint4 b = load_shared16(x[n].x + J * ORDER::GROUP);
      mma(c[n], a0, a1, a2, a3, b.x, b.y);
      mma(c[n], a4, a5, a6, a7, b.z, b.w);
    }
  }
};

// ---- Q4_0, Q5_0, Q8_0: a float16 scale for each group of 32, which acts on the group's sum

template <class SELF> struct FloatScales {
  static constexpr int LANE = 16;
  static constexpr bool SUMS = false;
  uint4 steps[2];

  template <class ORDER, int N> DEVICE void add(float (&sum)[N][4], const Activations (&x)[N]) const {
    u32 magic = in_register(MAGIC);
    float inner[N][4] = {};
    group<0, ORDER>(inner, x, magic);
    group<1, ORDER>(inner, x, magic);
    group<2, ORDER>(inner, x, magic);
    group<3, ORDER>(inner, x, magic);
    group<4, ORDER>(inner, x, magic);
    group<5, ORDER>(inner, x, magic);
    group<6, ORDER>(inner, x, magic);
    group<7, ORDER>(inner, x, magic);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += x[n].factors[i % 2] * inner[n][i];
  }

 private:
  template <int J, class ORDER, int N>
  DEVICE void group(float (&inner)[N][4], const Activations (&x)[N], u32 magic) const {
    const SELF& self = *(const SELF*)this;
    u32 a[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      a[r][0] = self.template number<J, 0>(r, magic);
      a[r][1] = self.template number<J, 1>(r, magic);
      a[r][2] = self.template number<J, 2>(r, magic);
      a[r][3] = self.template number<J, 3>(r, magic);
    }
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 word = J / 2 == 0 ? steps[r].x : J / 2 == 1 ? steps[r].y : J / 2 == 2 ? steps[r].z : steps[r].w;
      scale[r] = J % 2 ? high_float(word) : low_float(word);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      float c[4] = {};
      uint4 b = load_shared16(x[n].x + J * ORDER::GROUP);
      mma(c, a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
      mma(c, a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
#pragma unroll
      for (int i = 0; i < 4; i++) inner[n][i] += scale[i / 2] * c[i];
    }
  }
};

template <bool FIFTH> struct Signed4 : FloatScales<Signed4<FIFTH>> {
  static constexpr int HIGH = 2048, STEPS = HIGH + (FIFTH ? 512 : 0), BYTES = STEPS + 256;
  Codes<FIFTH> codes[2];

  DEVICE void load(u32 at, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = lane / 4 + 8 * r;
      codes[r].load(at, at + HIGH, lane, row);
      this->steps[r] = load_shared16(at + STEPS + row * 16);
    }
  }

  template <int J, int Q> DEVICE u32 number(int r, u32 magic) const {
    u32 biased = codes[r].template biased<J, Q>(magic);
    if (J % 2) return fma_half2(biased, 0x2C002C00u, FIFTH ? 0xD500D500u : 0xD480D480u);  // / 16, - 64 - 16 or 8
    return add_half2(biased, FIFTH ? 0xE410E410u : 0xE408E408u);                          // - 1024 - 16 or 8
  }
};

struct Q8_0 : FloatScales<Q8_0> {
  static constexpr int STEPS = 4096, BYTES = STEPS + 256;
  uint2 codes[2][8];

  DEVICE void load(u32 at, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = lane / 4 + 8 * r;
#pragma unroll
      for (int j = 0; j < 8; j++) codes[r][j] = load_shared8(at + j * 512 + row * 32 + (lane & 3) * 8);
      steps[r] = load_shared16(at + STEPS + row * 16);
    }
  }

  template <int J, int Q> DEVICE u32 number(int r, u32 magic) const {
    u32 four = (Q < 2 ? codes[r][J].x : codes[r][J].y) ^ 0x80808080u;  // + 128
    return add_half2(__byte_perm(four, magic, Q % 2 ? 0x5352 : 0x5150), 0xE480E480u);
  }
};

// ---- Q6_K: a signed 8-bit scale for each group of 16, one float16 scale for all

struct Q6_K {
  static constexpr int HIGH = 2048, SCALES = 3072, STEPS = 3328, BYTES = 3360, LANE = 8;
  static constexpr bool SUMS = false;
  uint2 codes[2][4], high[2][2];
  uint4 scales[2];
  u32 steps[2];

  DEVICE void load(u32 at, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = lane / 4 + 8 * r;
#pragma unroll
      for (int h = 0; h < 4; h++) codes[r][h] = load_shared8(at + h * 512 + row * 32 + (lane & 3) * 8);
#pragma unroll
      for (int h = 0; h < 2; h++) high[r][h] = load_shared8(at + HIGH + h * 512 + row * 32 + (lane & 3) * 8);
      scales[r] = load_shared16(at + SCALES + row * 16);
      steps[r] = load_shared2(at + STEPS + row * 2);
    }
  }

  template <class ORDER, int N> DEVICE void add(float (&sum)[N][4], const Activations (&x)[N]) const {
    u32 magic = in_register(MAGIC);
    float inner[N][4] = {};
    four_groups<0, ORDER>(inner, x, magic);
    four_groups<1, ORDER>(inner, x, magic);
    four_groups<2, ORDER>(inner, x, magic);
    four_groups<3, ORDER>(inner, x, magic);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += x[n].factors[i % 2] * low_float(steps[i / 2]) * inner[n][i];
  }

 private:
  template <int H, class ORDER, int N>
  DEVICE void four_groups(float (&inner)[N][4], const Activations (&x)[N], u32 magic) const {
    group<4 * H, ORDER>(inner, x, magic);
    group<4 * H + 1, ORDER>(inner, x, magic);
    group<4 * H + 2, ORDER>(inner, x, magic);
    group<4 * H + 3, ORDER>(inner, x, magic);
  }

  template <int J, class ORDER, int N>
  DEVICE void group(float (&inner)[N][4], const Activations (&x)[N], u32 magic) const {
    u32 a0 = number<J, 0>(0, magic), a1 = number<J, 0>(1, magic), a2 = number<J, 1>(0, magic), a3 = number<J, 1>(1, magic);
    float scale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 four = J / 4 == 0 ? scales[r].x : J / 4 == 1 ? scales[r].y : J / 4 == 2 ? scales[r].z : scales[r].w;
      scale[r] = (float)(signed char)(four >> (8 * (J % 4)));
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      float c[4] = {};
      uint2 b = load_shared8(x[n].x + J / 2 * ORDER::GROUP + J % 2 * (ORDER::GROUP / 2));
      mma(c, a0, a1, a2, a3, b.x, b.y);
#pragma unroll
      for (int i = 0; i < 4; i++) inner[n][i] += scale[i / 2] * c[i];
    }
  }

  template <int J, int Q> DEVICE u32 number(int r, u32 magic) const {
    u32 word = Q ? codes[r][J / 4].y : codes[r][J / 4].x, bits = Q ? high[r][J / 8].y : high[r][J / 8].x;
    u32 biased = and_or<0x000F000Fu>(word >> (4 * (J % 4)), magic);
    return add_half2(and_or<0x00300030u>(shift_left<4 - 2 * (J % 8)>(bits), biased), 0xE420E420u);  // - 1024 - 32
  }
};

typedef IntegerScales<false> Q4_K;
typedef IntegerScales<true> Q5_K;
typedef Signed4<false> Q4_0;
typedef Signed4<true> Q5_0;
