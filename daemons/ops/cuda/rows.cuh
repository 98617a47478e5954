// Eight rows of activations of a chunk of 256 columns, as the lanes of a warp read them as the second factor.
#pragma once

#include "activations.cuh"
#include "tiles.cuh"

constexpr int COLUMNS = 256, NUMBER_BYTES = 4096, SUM_BYTES = KIND::SUMS ? 256 : 0, FACTOR_BYTES = 32;

// Where in a chunk of eight rows a lane's 16 bytes of group j go: see Activations::x
DEVICE int place(int j, int lane) {
  if (KIND::LANE == 16) return j * 512 + lane * 16;
  return (2 * j + lane % 4 / 2) * 256 + lane / 4 * 32 + lane % 2 * 16;
}

// A warp scales a chunk of eight rows: lane 4 g + t has eight neighbouring numbers of each group of 32 of row g.  To
// NUMBER_BYTES of numbers, SUM_BYTES: for each lane the sums over two groups, then their rounding errors, and FACTOR_BYTES.
DEVICE void keep_rows(u8* numbers, u8* sums, u8* factors, const u16* x, bool exists, int column, int width, int lane) {
  uint4 raw[8];
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < 8; j++)
    raw[j] = exists ? load_activations(x, column + 32 * j + lane % 4 * 8, width) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int j = 0; j < 8; j++) largest = max(largest, largest_of(raw[j]));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  Power power(largest);
  float mine[2] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float sum;
    *(uint4*)(numbers + place(j, lane)) = scaled(raw[j], power.scale, sum);
    if (KIND::SUMS) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (j / 2 == lane % 4) mine[j % 2] = sum;
    }
  }
  if (KIND::SUMS) {
    u32 rounded = pack_half2(mine[0], mine[1]);
    u32 errors = pack_half2(mine[0] - low_float(rounded), mine[1] - high_float(rounded));
    *(uint2*)(sums + lane * 8) = make_uint2(rounded, errors);
  }
  if (lane % 4 == 0) *(float*)(factors + lane) = power.back;
}
