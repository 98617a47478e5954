// Eight rows of activations of a chunk of 256 columns, as the lanes of a warp read them as the second factor.
#pragma once

#include "activations.cuh"
#include "tiles.cuh"

constexpr int COLUMNS = 256, NUMBER_BYTES = 4096, SUM_BYTES = KIND::SUMS ? 256 : 0, FACTOR_BYTES = 32;
constexpr int EIGHT_ROWS_BYTES = NUMBER_BYTES + SUM_BYTES + FACTOR_BYTES;

// As the lanes of a warp read them as the second factor.
struct LaneOrder {
  static constexpr int SUMS = 8, ERRORS = 4;  // bytes of a lane's sums, from those to their errors

  // Of a lane's 16 bytes of group j: see Activations::x
  DEVICE static void keep(u8* numbers, int j, int lane, const uint4& words) {
    int at = (2 * j + lane % 4 / 2) * 256 + lane / 4 * 32 + lane % 2 * 16;
    if (KIND::LANE == 16) at = j * 512 + lane * 16;
    *(uint4*)(numbers + at) = words;
  }
};

// A chunk of eight rows: lane 4 g + t gets eight neighbouring numbers of each group of 32 of row g, where that exists.
DEVICE void load_rows(uint4 (&raw)[8], const u16* x, bool exists, int column, int width, int lane) {
#pragma unroll
  for (int j = 0; j < 8; j++)
    raw[j] = exists ? load_activations(x, column + 32 * j + lane % 4 * 8, width) : make_uint4(0, 0, 0, 0);
}

// A warp scales them.  To NUMBER_BYTES of numbers, SUM_BYTES: for each lane the sums over two groups, and their rounding errors,
// and FACTOR_BYTES.
template <class ORDER = LaneOrder> DEVICE void keep_rows(u8* numbers, u8* sums, u8* factors, const uint4 (&raw)[8], int lane) {
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) largest = max(largest, largest_of(raw[j]));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  Power power(largest);
  float mine[2] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float sum;
    ORDER::keep(numbers, j, lane, scaled(raw[j], power.scale, sum));
    if (KIND::SUMS) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (j / 2 == lane % 4) mine[j % 2] = sum;
    }
  }
  if (KIND::SUMS) {
    u32 rounded = pack_half2(mine[0], mine[1]);
    *(u32*)(sums + lane * ORDER::SUMS) = rounded;
    *(u32*)(sums + lane * ORDER::SUMS + ORDER::ERRORS) = pack_half2(mine[0] - low_float(rounded), mine[1] - high_float(rounded));
  }
  if (lane % 4 == 0) *(float*)(factors + lane) = power.back;
}

template <class ORDER = LaneOrder>
DEVICE void keep_rows(u8* numbers, u8* sums, u8* factors, const u16* x, bool exists, int column, int width, int lane) {
  uint4 raw[8];
  load_rows(raw, x, exists, column, width, lane);
  keep_rows<ORDER>(numbers, sums, factors, raw, lane);
}

// Where the next chunk of 8 N rows is that a block keeps
template <int N> struct Cursor {
  typedef LaneOrder ORDER;
  u32 numbers, sums, factors;

  DEVICE Cursor(u32 numbers, u32 sums, u32 factors, int lane)
      : numbers(numbers + lane * KIND::LANE), sums(sums + lane * 8), factors(factors + lane % 4 * 8) {}

  // Adds its product with a tile.
  DEVICE void add(float (&sum)[N][4], const KIND& weights) {
    Activations rows[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      uint2 two = load_shared8(factors + n * FACTOR_BYTES);
      rows[n] = {numbers + n * NUMBER_BYTES, sums + n * SUM_BYTES, {__uint_as_float(two.x), __uint_as_float(two.y)}};
    }
    weights.template add<Order<512, 4>>(sum, rows);
    numbers += N * NUMBER_BYTES;
    sums += N * SUM_BYTES;
    factors += N * FACTOR_BYTES;
  }
};
