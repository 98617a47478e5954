// Rows of activations times plain matrices, bfloat16 or float32, and the other operations whose torch forms give a number
// other bits for other numbers beside it: torch computes the ends of ranges, which threads share, without vectors.
//
// A product is one sum over the columns in sixteen lanes, in order, and then the sum of the lanes.  Blocks of rows only
// share what is loaded, so a row's bits depend neither on the rows beside it nor on the number of threads.
#pragma once
#include "parallel.h"
#include "rows.h"

inline Floats load_numbers(const uint16_t* x, Mask mask) { return load_bfloat16(x, mask); }
inline Floats load_numbers(const float* x, Mask mask) { return mask == ALL ? load(x) : load(x, mask); }
inline void store_number(uint16_t* out, float x) { store_bfloat16(out, lanes(0, 1), splat(x)); }
inline void store_number(float* out, float x) { *out = x; }

template <class Number, class Out>
struct DenseProduct {
  static constexpr long ROWS = WIDE ? 4 : 2, COLUMNS = WIDE ? 4 : 2;  // of a block, whose sums fit into registers
  static constexpr long STRIP = 32;  // rows of the matrix that a thread takes at a time

  const Number *x, *weight;  // [n][columns], [n_out][columns]
  Out* out;                  // [n], rows `out_stride` apart
  long n, columns, n_out, out_stride;

  template <int R, int C>
  void block(long row, long column) const {
    Floats sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = splat(0.f);
    const Number *in = x + row * columns, *w = weight + column * columns;
    for (long i = 0; i < columns; i += LANES) {
      const Mask m = lanes(i, columns);
      Floats a[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) a[r] = load_numbers(in + r * columns + i, m);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const Floats b = load_numbers(w + c * columns + i, m);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sum[r][c] = add_product(a[r], b, sum[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) store_number(out + (row + r) * out_stride + column + c, sum_of(sum[r][c]));
  }

  template <int R>
  void rows(long row, long begin, long end) const {
    long column = begin;
    for (; column + COLUMNS <= end; column += COLUMNS) block<R, COLUMNS>(row, column);
    for (; column < end; column++) block<R, 1>(row, column);
  }

  void strip(long i) const {
    const long begin = i * STRIP, end = std::min(n_out, begin + STRIP);
    long row = 0;
    for (; row + ROWS <= n; row += ROWS) rows<ROWS>(row, begin, end);
    for (; row < n; row++) rows<1>(row, begin, end);
  }

  void run() const {
    parallel_for<true>(n * columns * n_out > PARALLEL, (n_out + STRIP - 1) / STRIP, [&](long i) { strip(i); });
  }
};

// cap tanh(x / cap)
inline Floats soft_capped(Floats x, float cap) {
  const Floats two = splat(2.f), one = splat(1.f);
  return splat(cap) * (one - two / (exponential(x * splat(2.f / cap)) + one));
}

// Scores of a router's row to probabilities: each one's sigmoid, or their softmax.
inline void gate_row(const float* x, long n, bool is_sigmoid, float* out) {
  float largest = -std::numeric_limits<float>::infinity();
  for (long i = 0; i < n; i++) largest = std::max(largest, x[i]);
  Floats sum = splat(0.f);
  for (long i = 0; i < n; i += LANES) {
    const Mask m = lanes(i, n);
    const Floats score = load_numbers(x + i, m);
    const Floats weight = is_sigmoid ? sigmoid(score) : exponential(score - splat(largest));
    store(out + i, m, weight);
    sum = sum + select(m, weight, splat(0.f));
  }
  if (is_sigmoid) return;
  const float total = sum_of(sum);
  for (long i = 0; i < n; i++) out[i] /= total;
}
