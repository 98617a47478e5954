// Activations as float16 over a power of two for each chunk of 256: exact but for numbers 2^25 times smaller than the
// chunk's largest.
#pragma once

#include "ptx.cuh"

#ifdef FLOAT16_ACTIVATIONS
DEVICE float low_activation(u32 a) { return low_float(a); }
DEVICE float high_activation(u32 a) { return high_float(a); }
DEVICE u16 to_activation(float v) { return to_float16(v); }
#else
DEVICE float low_activation(u32 a) { return __uint_as_float(a << 16); }
DEVICE float high_activation(u32 a) { return __uint_as_float(a & 0xFFFF0000u); }
DEVICE u16 to_activation(float v) { return to_bfloat16(v); }
#endif

DEVICE float from_activation(u16 v) { return low_activation(v); }

// The largest magnitude of eight numbers, as the bits of a float.
DEVICE u32 largest_of(uint4 raw) {
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w}, largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    largest = max(largest, __float_as_uint(low_activation(words[i])) & 0x7FFFFFFFu);
    largest = max(largest, __float_as_uint(high_activation(words[i])) & 0x7FFFFFFFu);
  }
  return largest;
}

// The power of two that brings the largest magnitude of a chunk to [512, 1024), and back
struct Power {
  float scale, back;

  DEVICE Power(u32 largest) {
    u32 exponent = min(max(largest >> 23, 10u), 254u);
    scale = __uint_as_float((263u - exponent) << 23);
    back = __uint_as_float((exponent - 9u) << 23);
  }
};

// Eight numbers times a scale, as float16; `sum`: of all eight.
DEVICE uint4 scaled(uint4 raw, float scale, float& sum) {
  float a[8] = {low_activation(raw.x), high_activation(raw.x), low_activation(raw.y), high_activation(raw.y),
                low_activation(raw.z), high_activation(raw.z), low_activation(raw.w), high_activation(raw.w)};
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] *= scale;
  sum = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
  return make_uint4(pack_half2(a[0], a[1]), pack_half2(a[2], a[3]), pack_half2(a[4], a[5]), pack_half2(a[6], a[7]));
}

// Eight numbers of a row of `width` numbers from `column` on; zero behind its end.
DEVICE uint4 load_activations(const u16* row, int column, int width) {
  return column < width ? *(const uint4*)(row + column) : make_uint4(0, 0, 0, 0);
}
