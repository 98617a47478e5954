// Products of four tiles of packed weights, a warp each, with rows of activations that matrix units read from shared memory
// (wgmma).  A chunk of 256 columns of eight rows there is NUMBER_BYTES: for each 16 columns two matrices of 8 rows x 8 columns,
// 128 bytes each.  The order of columns is that in which a lane holds them of the weights.
#pragma once

#include "rows.cuh"

constexpr int MATRIX = 128, AHEAD = 1;  // groups whose products pass while the next one's start

// As matrix units read them.
struct MatrixOrder {
  static constexpr int SUMS = 4, ERRORS = MATRIX;

  // A lane's words of group j, each in a matrix of its own
  DEVICE static void keep(u8* numbers, int j, int lane, const uint4& words) {
    u8* at = numbers + lane / 4 * 16;
    constexpr bool WHOLE = KIND::LANE == 16;
    at += WHOLE ? 4 * j * MATRIX + lane % 4 * 4 : (2 * j + lane % 4 / 2) * 2 * MATRIX + lane % 2 * 8;
    *(u32*)at = words.x;
    *(u32*)(at + MATRIX) = words.y;
    *(u32*)(at + (WHOLE ? 2 * MATRIX : 4)) = words.z;
    *(u32*)(at + (WHOLE ? 3 * MATRIX : MATRIX + 4)) = words.w;
  }
};

// Where matrix units find two matrices of 8 columns, the second one MATRIX bytes on, of eight rows and every NEXT_ROWS bytes
// of eight more: addresses over 16.
template <int NEXT_ROWS> DEVICE u64 second_factor(u32 at) {
  return (u64)(NEXT_ROWS >> 4) << 32 | ((at >> 4) | MATRIX >> 4 << 16);
}

// A chunk of 8 N rows of activations in shared memory: addresses of numbers, sums and of a lane's factors
template <int N> struct WideRows {
  u32 numbers, sums, factors;

  // Columns 16 i and on
  DEVICE u64 columns(int i) const { return second_factor<NUMBER_BYTES>(numbers + i * 2 * MATRIX); }

  // Sums of rows 8 n and on
  DEVICE u64 sums_of(int n) const { return second_factor<SUM_BYTES>(sums + n * SUM_BYTES); }

  // What rows 8 n + 2 t and + 1 were divided by
  DEVICE void factors_of(float (&two)[2], int n) const {
    uint2 found = load_shared8(factors + n * FACTOR_BYTES);
    two[0] = __uint_as_float(found.x), two[1] = __uint_as_float(found.y);
  }
};

// Adds a lane's part sums, each row of the matrix by its factor, times what the activations were divided by.
template <int N, int M, class ROW_FACTOR>
DEVICE void add_rows(float (&sum)[N][4], const float (&part)[M][4], const WideRows<N>& x, int first, ROW_FACTOR row_factor) {
#pragma unroll
  for (int m = 0; m < M; m++) {
    float factors[2];
    x.factors_of(factors, first + m);
#pragma unroll
    for (int i = 0; i < 4; i++) sum[first + m][i] += factors[i % 2] * row_factor(i / 2) * part[m][i];
  }
}

// Starts the product of group J with the numbers that a lane has of it.
template <int J, int PAIRS, int N>
DEVICE void start_group(float (&c)[N][4], const u32 (&a)[PAIRS][2], const WideRows<N>& x, bool adds) {
  publish_registers();
  start_product(c, a[0][0], a[0][1], a[1][0], a[1][1], x.columns(J * PAIRS / 2), adds);
  if constexpr (PAIRS == 4) start_product(c, a[2][0], a[2][1], a[3][0], a[3][1], x.columns(2 * J + 1), 1);
  end_products();
}

// Steps from J on: starts the product of group J, and scales the sums of the one AHEAD groups before.
template <int J, int GROUPS, class WEIGHTS, int N>
DEVICE void add_groups(float (&inner)[N][4], float (&c)[GROUPS][N][4], const WEIGHTS& w, const WideRows<N>& x, u32 magic) {
  if constexpr (J < GROUPS) {
    u32 a[32 / GROUPS][2];
    w.template numbers<J, false>(a, magic);
    start_group<J>(c[J], a, x, false);
  }
  if constexpr (J >= AHEAD) {
    constexpr int DONE = J - AHEAD;
    wait_for_products<(J < GROUPS ? AHEAD : GROUPS - 1 - DONE)>();
    keep_in_order(c[DONE]);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) inner[n][i] += w.template scale<DONE>(i / 2, magic) * c[DONE][n][i];
  }
  if constexpr (J + 1 < GROUPS + AHEAD) add_groups<J + 1, GROUPS>(inner, c, w, x, magic);
}

// Groups from J on, whose numbers are scaled, so that all sums are one.  Behind the start of group J, `beside(J)` may wait for
// products started before it, and start others.
template <int J, class WEIGHTS, int N, class BESIDE>
DEVICE void add_scaled(float (&inner)[N][4], const WEIGHTS& w, const WideRows<N>& x, u32 magic, BESIDE beside) {
  if constexpr (J < WEIGHTS::N_GROUPS) {
    u32 a[32 / WEIGHTS::N_GROUPS][2];
    w.template numbers<J, true>(a, magic);
    start_group<J>(inner, a, x, J > 0);
    if constexpr (J >= AHEAD) wait_for_products<AHEAD>();
    beside(J);
    add_scaled<J + 1>(inner, w, x, magic, beside);
  } else {
    wait_for_products<0>();
    keep_in_order(inner);
  }
}

// Adds a chunk's product of a tile of each of four warps.
template <bool FIFTH, int N> DEVICE void add_wide(float (&sum)[N][4], const IntegerScales<FIFTH>& w, const WideRows<N>& x) {
  float inner[N][4] = {};
  u32 magic = in_register(MAGIC), low[2], scale[2];
  w.all_factors(low, scale, magic);
  if constexpr (N > IntegerScales<FIFTH>::MAX_SUMS) {
    constexpr int PART = N > 4 ? 4 : N;  // of the rows, whose minima are multiplied at once
    float minimum[PART][4];
    auto start_minima = [&](int n) {
      publish_registers();
      start_product(minimum, low[0], low[1], low[0], low[1], x.sums_of(n), 0);
      end_products();
    };
    start_minima(0);
    add_scaled<0>(inner, w, x, magic, [&](int j) {
      if (j >= N / PART) return;
      wait_for_products<1>();
      keep_in_order(minimum);
      add_rows(sum, minimum, x, j * PART, [&](int r) { return -w.dmin(r); });
      if (j + 1 < N / PART) start_minima((j + 1) * PART);
    });
    add_rows(sum, inner, x, 0, [&](int r) { return w.d(r); });
  } else {
    float minimum[N][4], excess[N][4], c[8][N][4];
    publish_registers();
    start_product(minimum, low[0], low[1], low[0], low[1], x.sums_of(0), 0);
    start_product(excess, scale[0], scale[1], scale[0], scale[1], x.sums_of(0), 0);
    end_products();
    add_groups<0, 8>(inner, c, w, x, magic);
    keep_in_order(minimum);
    keep_in_order(excess);
#pragma unroll
    for (int n = 0; n < N; n++) {
      float factors[2];
      x.factors_of(factors, n);
#pragma unroll
      for (int i = 0; i < 4; i++) sum[n][i] += factors[i % 2] * w.total(i, inner[n][i], excess[n][i], minimum[n][i]);
    }
  }
}

template <class SELF, int GROUPS, int N>
DEVICE void add_wide(float (&sum)[N][4], const GroupScales<SELF, GROUPS>& weights, const WideRows<N>& x) {
  const SELF& w = *(const SELF*)&weights;
  float inner[N][4] = {};
  u32 magic = in_register(MAGIC);
  if constexpr (N > SELF::MAX_SUMS) {
    add_scaled<0>(inner, w, x, magic, [](int) {});
  } else {
    float c[GROUPS][N][4];
    add_groups<0, GROUPS>(inner, c, w, x, magic);
  }
  add_rows(sum, inner, x, 0, [&](int r) { return w.step(r); });
}

// Where the next chunk of 8 N rows is that a block keeps
template <int N> struct WideCursor {
  typedef MatrixOrder ORDER;
  WideRows<N> rows;

  DEVICE WideCursor(u32 numbers, u32 sums, u32 factors, int lane) : rows{numbers, sums, factors + lane % 4 * 8} {}

  // Adds its product with a tile of each of four warps.
  DEVICE void add(float (&sum)[N][4], const KIND& weights) {
    add_wide(sum, weights, rows);
    rows.numbers += N * NUMBER_BYTES;
    rows.sums += N * SUM_BYTES;
    rows.factors += N * FACTOR_BYTES;
  }
};
