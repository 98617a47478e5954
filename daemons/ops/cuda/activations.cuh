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

struct ScaledChunk {
  uint4 numbers;  // this lane's eight, float16
  float factor;   // what they were divided by
  float sum;      // of the 32 numbers of this lane and its three neighbours
};

// A warp scales a chunk, eight neighbouring numbers a lane.
DEVICE ScaledChunk scale_chunk(uint4 raw) {
  float a[8] = {low_activation(raw.x), high_activation(raw.x), low_activation(raw.y), high_activation(raw.y),
                low_activation(raw.z), high_activation(raw.z), low_activation(raw.w), high_activation(raw.w)};
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(a[i]) & 0x7FFFFFFFu);
  u32 exponent = min(max(__reduce_max_sync(~0u, largest) >> 23, 10u), 254u);
  float scale = __uint_as_float((263u - exponent) << 23);  // the largest is in [512, 1024) now
#pragma unroll
  for (int i = 0; i < 8; i++) a[i] *= scale;
  ScaledChunk out;
  out.numbers = make_uint4(pack_half2(a[0], a[1]), pack_half2(a[2], a[3]), pack_half2(a[4], a[5]), pack_half2(a[6], a[7]));
  out.factor = __uint_as_float((exponent - 9u) << 23);
  float sum = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
  sum += __shfl_xor_sync(~0u, sum, 1);
  out.sum = sum + __shfl_xor_sync(~0u, sum, 2);
  return out;
}

// Eight numbers of a row of `width` numbers from `column` on; zero behind its end.
DEVICE uint4 load_activations(const u16* row, int column, int width) {
  return column < width ? *(const uint4*)(row + column) : make_uint4(0, 0, 0, 0);
}
