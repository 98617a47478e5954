// Products of a tile of packed weights, 16 rows x 256 columns (daemons/weights/packed.py), with activations in float16.
//
// Each quant type is a class: BYTES of a tile, LANE: bytes of activations that a lane reads at once, SUMS: whether it needs
// their sums, load() a tile from shared memory to a warp's registers, add() its product.  A lane is 4 g + t and holds parts of
// rows g and g + 8.  Codes become float16 numbers exactly: a code or 16 codes beside the exponent of 1024 is 1024 + code, one
// fused operation takes 1024 off and multiplies by an integer scale where there is one.  The order of columns is the same in
// both factors, so any will do.
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

  DEVICE u32 loaded() const { return words[0].x ^ words[1].x ^ (FIFTH ? high.x : 0); }

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

// ---- Q4_K, Q5_K: integer scales and minima.  With up to 16 rows of activations a group's scale acts on its float32 sum of
// products with 1024 + code, or with 64 + code; that is too much by a product of scales and sums of activations, as minima are.
// With more rows (MAX_SUMS eights) scales act on codes, and one product sums the whole chunk: code x scale < 2,048 is exact.

template <bool FIFTH> struct IntegerScales {
  static constexpr int HIGH = 2048, SCALES = HIGH + (FIFTH ? 512 : 0), BYTES = SCALES + 256;
  static constexpr int N_GROUPS = 8, LANE = 16, MAX_SUMS = 2;
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

  // Made of a word of each load
  DEVICE u32 loaded() const { return codes[0].loaded() ^ codes[1].loaded() ^ scales[0].x ^ scales[1].x ^ minima[0] ^ minima[1]; }

  template <class ORDER, int N> DEVICE void add(float (&sum)[N][4], const Activations (&x)[N]) const {
    constexpr bool SCALED = N > MAX_SUMS;
    float inner[N][4] = {};
    u32 magic = in_register(MAGIC), low[2], scale[2];
    groups<0, SCALED, ORDER>(inner, x, magic);
    all_factors(low, scale, magic);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float minimum[4] = {}, excess[4] = {};
      u32 sums = load_shared4(x[n].sums), errors = load_shared4(x[n].sums + ORDER::LOW);
      mma(minimum, low[0], low[1], low[0], low[1], sums, errors);
      if (!SCALED) mma(excess, scale[0], scale[1], scale[0], scale[1], sums, errors);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += x[n].factors[i % 2] * total(i, inner[n][i], excess[i], minimum[i]);
    }
  }

  // Group J as a lane has it of the first factor: 1024 + code, for odd groups 1024 + 16 code; SCALED: code x scale.
  template <int J, bool SCALED> DEVICE void numbers(u32 (&a)[4][2], u32 magic) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      a[0][r] = codes[r].template biased<J, 0>(magic);
      a[1][r] = codes[r].template biased<J, 1>(magic);
      a[2][r] = codes[r].template biased<J, 2>(magic);
      a[3][r] = codes[r].template biased<J, 3>(magic);
      if (!SCALED) continue;
      u32 two = integers(word<J / 2>(r), magic), bias = mul_half2(two, 0xE400E400u);
      two = J % 2 ? both_high(two) : both_low(two);
      bias = J % 2 ? both_high(bias) : both_low(bias);
#pragma unroll
      for (int q = 0; q < 4; q++) a[q][r] = fma_half2(a[q][r], two, bias);
    }
  }

  // Of group J of row g or g + 8, over 16 for odd groups
  template <int J> DEVICE float scale(int r, u32 magic) const {
    u32 two = integers(word<J / 2>(r), magic);
    return J % 2 ? high_float(two) : low_float(two);
  }

  // Minima and scales of a lane's two groups, to be multiplied with sums of activations
  DEVICE void all_factors(u32 (&low)[2], u32 (&scale)[2], u32 magic) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      low[r] = add_half2(and_or<0x003F003Fu>(minima[r] >> 6, magic), 0xE400E400u);
      scale[r] = integers(minima[r], magic);
    }
  }

  // Factors of row g or g + 8
  DEVICE float d(int r) const { return low_float(d_and_dmin(scales[r])); }
  DEVICE float dmin(int r) const { return high_float(d_and_dmin(scales[r])); }

  // A lane's sum i of a chunk
  DEVICE float total(int i, float inner, float excess, float minimum) const {
    return d(i / 2) * (inner - 1024.f * excess) - dmin(i / 2) * minimum;
  }

 private:
  DEVICE static u32 d_and_dmin(const uint4& s) {
    return ((s.x >> 12) & 0x000F000Fu) | ((s.y >> 8) & 0x00F000F0u) | ((s.z >> 4) & 0x0F000F00u) | (s.w & 0xF000F000u);
  }

  // The scales of a word's two groups, the second one's over 16
  DEVICE static u32 integers(u32 word, u32 magic) {
    return fma_half2(and_or<0x003F003Fu>(word, magic), 0x2C003C00u, 0xD400E400u);
  }

  template <int W> DEVICE u32 word(int r) const {
    return W == 0 ? scales[r].x : W == 1 ? scales[r].y : W == 2 ? scales[r].z : scales[r].w;
  }

  // Groups from J on
  template <int J, bool SCALED, class ORDER, int N>
  DEVICE void groups(float (&inner)[N][4], const Activations (&x)[N], u32 magic) const {
    if constexpr (J < N_GROUPS) {
      u32 a[4][2];
      numbers<J, SCALED>(a, magic);
#pragma unroll
      for (int n = 0; n < N; n++) {
        if (SCALED) {
          multiply<J, ORDER>(inner[n], a, x[n]);
          continue;
        }
        float c[4] = {};
        multiply<J, ORDER>(c, a, x[n]);
#pragma unroll
        for (int i = 0; i < 4; i++) inner[n][i] += scale<J>(i / 2, magic) * c[i];
      }
      groups<J + 1, SCALED, ORDER>(inner, x, magic);
    }
  }

  template <int J, class ORDER> DEVICE static void multiply(float (&c)[4], const u32 (&a)[4][2], const Activations& x) {
    uint4 b = load_shared16(x.x + J * ORDER::GROUP);
    mma(c, a[0][0], a[0][1], a[1][0], a[1][1], b.x, b.y);
    mma(c, a[2][0], a[2][1], a[3][0], a[3][1], b.z, b.w);
  }
};

// ---- The others: a scale for each of GROUPS groups, which acts on the group's sum.  A SELF has scale<J>(r, magic), step(r), which
// acts on all groups of a row, and number<J, Q>(r, magic), pair Q of group J.

template <class SELF, int GROUPS> struct GroupScales {
  static constexpr int N_GROUPS = GROUPS, LANE = GROUPS == 8 ? 16 : 8;
  static constexpr bool SUMS = false;

  template <class ORDER, int N> DEVICE void add(float (&sum)[N][4], const Activations (&x)[N]) const {
    const SELF& self = *(const SELF*)this;
    float inner[N][4] = {};
    groups<0, ORDER>(inner, x, in_register(MAGIC));
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += x[n].factors[i % 2] * self.step(i / 2) * inner[n][i];
  }

  // Group J as a lane has it of the first factor; SCALED: times its scale
  template <int J, bool SCALED> DEVICE void numbers(u32 (&a)[32 / GROUPS][2], u32 magic) const {
    const SELF& self = *(const SELF*)this;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      a[0][r] = self.template number<J, 0>(r, magic);
      a[1][r] = self.template number<J, 1>(r, magic);
      if constexpr (GROUPS == 8) {
        a[2][r] = self.template number<J, 2>(r, magic);
        a[3][r] = self.template number<J, 3>(r, magic);
      }
      if constexpr (SCALED) {
        u32 two = self.template scale_twice<J>(r, magic);
#pragma unroll
        for (int q = 0; q < 32 / GROUPS; q++) a[q][r] = mul_half2(a[q][r], two);
      }
    }
  }

 private:
  // Groups from J on
  template <int J, class ORDER, int N>
  DEVICE void groups(float (&inner)[N][4], const Activations (&x)[N], u32 magic) const {
    if constexpr (J < GROUPS) {
      constexpr int PAIRS = 32 / GROUPS;
      const SELF& self = *(const SELF*)this;
      u32 a[PAIRS][2];
      numbers<J, false>(a, magic);
#pragma unroll
      for (int n = 0; n < N; n++) {
        u32 b[PAIRS];
        load<PAIRS>(b, x[n].x + J * PAIRS * (ORDER::GROUP / 4));
        float c[4] = {};
        mma(c, a[0][0], a[0][1], a[1][0], a[1][1], b[0], b[1]);
        if constexpr (PAIRS == 4) mma(c, a[2][0], a[2][1], a[3][0], a[3][1], b[2], b[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) inner[n][i] += self.template scale<J>(i / 2, magic) * c[i];
      }
      groups<J + 1, ORDER>(inner, x, magic);
    }
  }

  template <int WORDS> DEVICE static void load(u32 (&b)[WORDS], u32 at) {
    if constexpr (WORDS == 4) {
      uint4 v = load_shared16(at);
      b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
    } else {
      uint2 v = load_shared8(at);
      b[0] = v.x, b[1] = v.y;
    }
  }
};

// ---- Q4_0, Q5_0, Q8_0: a float16 scale for each group of 32

template <class SELF> struct FloatScales : GroupScales<SELF, 8> {
  static constexpr int MAX_SUMS = 8;  // its scales never act on codes: the products would be rounded
  uint4 steps[2];

  template <int J> DEVICE float scale(int r, u32) const {
    u32 word = J / 2 == 0 ? steps[r].x : J / 2 == 1 ? steps[r].y : J / 2 == 2 ? steps[r].z : steps[r].w;
    return J % 2 ? high_float(word) : low_float(word);
  }

  DEVICE float step(int) const { return 1.f; }
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

  DEVICE u32 loaded() const { return codes[0].loaded() ^ codes[1].loaded() ^ this->steps[0].x ^ this->steps[1].x; }

  template <int J, int Q> DEVICE u32 number(int r, u32 magic) const {
    u32 biased = codes[r].template biased<J, Q>(magic);
    if (J % 2) return fma_half2(biased, 0x2C002C00u, FIFTH ? 0xD500D500u : 0xD480D480u);  // / 16, - 64 - 16 or 8
    return add_half2(biased, FIFTH ? 0xE410E410u : 0xE408E408u);                          // - 1024 - 16 or 8
  }
};

// ---- MXFP4: a power of two for each group of 32.  A code, sign | two bits of exponent | one of mantissa, is a float16 number
// with those bits: value / 2^14, exactly, subnormal ones included.

struct MXFP4 : GroupScales<MXFP4, 8> {
  static constexpr int STEPS = 2048, BYTES = STEPS + 128, MAX_SUMS = 8;
  Codes<false> codes[2];
  uint2 exponents[2];

  DEVICE void load(u32 at, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = lane / 4 + 8 * r;
      codes[r].load(at, 0, lane, row);
      exponents[r] = load_shared8(at + STEPS + row * 8);
    }
  }

  DEVICE u32 loaded() const { return codes[0].loaded() ^ codes[1].loaded() ^ exponents[0].x ^ exponents[1].x; }

  // 2^(e - 127); zero in place of the subnormal 2^-127
  template <int J> DEVICE float scale(int r, u32) const {
    u32 four = J / 4 == 0 ? exponents[r].x : exponents[r].y;
    return __uint_as_float(shift_left<23 - 8 * (J % 4)>(four) & 0x7F800000u);
  }

  DEVICE float step(int) const { return 16384.f; }

  template <int J, int Q> DEVICE u32 number(int r, u32) const {
    const uint4& half = codes[r].words[J / 4];
    u32 word = Q == 0 ? half.x : Q == 1 ? half.y : Q == 2 ? half.z : half.w;
    return (shift_left<9 - 4 * (J % 4)>(word) & 0x0E000E00u) | (shift_left<12 - 4 * (J % 4)>(word) & 0x80008000u);
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

  DEVICE u32 loaded() const {
    u32 words = steps[0].x ^ steps[1].x;
#pragma unroll
    for (int j = 0; j < 8; j++) words ^= codes[0][j].x ^ codes[1][j].x;
    return words;
  }

  template <int J, int Q> DEVICE u32 number(int r, u32 magic) const {
    u32 four = (Q < 2 ? codes[r][J].x : codes[r][J].y) ^ 0x80808080u;  // + 128
    return add_half2(__byte_perm(four, magic, Q % 2 ? 0x5352 : 0x5150), 0xE480E480u);
  }
};

// ---- Q6_K: a signed 8-bit scale for each group of 16, one float16 scale for all.  With more than MAX_SUMS eights of rows scales act
// on codes: products up to 2,048 are exact, larger ones, up to 4,096, are rounded to even numbers.

struct Q6_K : GroupScales<Q6_K, 16> {
  static constexpr int HIGH = 2048, SCALES = 3072, STEPS = 3328, BYTES = 3360, MAX_SUMS = 4;
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

  DEVICE u32 loaded() const {
    u32 words = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      words ^= codes[r][0].x ^ codes[r][1].x ^ codes[r][2].x ^ codes[r][3].x;
      words ^= high[r][0].x ^ high[r][1].x ^ scales[r].x ^ steps[r];
    }
    return words;
  }

  template <int J> DEVICE float scale(int r, u32) const {
    u32 four = J / 4 == 0 ? scales[r].x : J / 4 == 1 ? scales[r].y : J / 4 == 2 ? scales[r].z : scales[r].w;
    return (float)(signed char)(four >> (8 * (J % 4)));
  }

  template <int J> DEVICE u32 scale_twice(int r, u32 magic) const {
    u32 four = J / 4 == 0 ? scales[r].x : J / 4 == 1 ? scales[r].y : J / 4 == 2 ? scales[r].z : scales[r].w;
    return add_half2(__byte_perm(four ^ 0x80808080u, magic, 0x5050 + 0x0101 * (J % 4)), 0xE480E480u);  // 1024 + 128 + scale
  }

  DEVICE float step(int r) const { return low_float(steps[r]); }

  // Of four groups two stand as codes beside 1024, two as 16 codes, so that two share each shift.
  template <int J, int Q> DEVICE u32 number(int r, u32 magic) const {
    u32 word = Q ? codes[r][J / 4].y : codes[r][J / 4].x, bits = Q ? high[r][J / 8].y : high[r][J / 8].x;
    constexpr bool TIMES_16 = J % 4 >= 2;
    word >>= (J % 4 + 1) / 2 * 4;
    bits = shift_left<4 - 2 * (J % 8) + 4 * TIMES_16>(bits);
    if (TIMES_16)  // / 16, - 64 - 32
      return fma_half2(and_or<0x03000300u>(bits, and_or<0x00F000F0u>(word, magic)), 0x2C002C00u, 0xD600D600u);
    return add_half2(and_or<0x00300030u>(bits, and_or<0x000F000Fu>(word, magic)), 0xE420E420u);  // - 1024 - 32
  }
};

typedef IntegerScales<false> Q4_K;
typedef IntegerScales<true> Q5_K;
typedef Signed4<false> Q4_0;
typedef Signed4<true> Q5_0;
