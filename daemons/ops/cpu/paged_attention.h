// Attention of short slices over pages of 64 positions in place.  Arithmetic is float32.
//
// Sixteen query rows of a kv head are the lanes of scores and weights.  Positions are taken in spans of SPAN from 0 on,
// pages one by one: a row's bits depend on what it sees, neither on the rows beside it nor on the number of threads.
#pragma once
#include <vector>

#include "avx512.h"

constexpr long PAGE = 64, SPAN = 1024, MAX_DIM = 1024, PARALLEL_NUMBERS = 1 << 16;
constexpr int TOGETHER = 16;  // positions that are scored together: `vdpbf16ps` takes 6 cycles and starts twice a cycle

// Numbers of pages [position][head][width], as bfloat16, float32, float16 or q8_0 (codes and a half scale for 32).
struct Pages {
  const uint8_t* numbers;
  const uint16_t* scales;
  long kind, heads, width, stored;  // stored: numbers a head takes in memory

  template <int KIND>
  Floats load(long slot, long head, long i, __mmask16 mask) const {
    const long at = (slot * heads + head) * stored + i;
    if constexpr (KIND == 0) return load_bfloat16((const uint16_t*)numbers + at, mask);
    if constexpr (KIND == 1) return _mm512_maskz_loadu_ps(mask, (const float*)numbers + at);
    if constexpr (KIND == 2) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, (const uint16_t*)numbers + at));
    const __m512i codes = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, numbers + at));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(codes), splat(_cvtsh_ss(scales[at / 32])));
  }
};

struct PagedAttention {
  const uint16_t* q;  // [slices n][heads][dim], rows `stride` apart
  Pages keys, values;
  const int32_t* tables;                 // [..][table_stride]
  const int64_t *rows, *starts, *lows;   // [slices]; lows may be null
  uint16_t* out;  // [slices n][heads][value dim]
  long stride, slices, n, heads, table_stride, window, causal;  // window 0: none
  float scale, softcap;

  long group() const { return heads / keys.heads; }
  long query_rows() const { return group() * n; }
  // Positions that a slice sees, and those that the row of a token sees.
  long end(long slice) const { return starts[slice] + n; }
  long first(long slice, long token) const {
    const long low = lows ? lows[slice] : 0, far = window ? starts[slice] + token + 1 - window : 0;
    return low > far ? low : far > 0 ? far : 0;
  }
  long last(long slice, long token) const { return starts[slice] + (causal ? token : n - 1); }

  // Numbers of a row of partial sums: those of the values, then the largest score and the sum of weights.
  long padded() const { return (values.width + LANES - 1) / LANES * LANES; }
  long partial_size() const { return padded() + 2; }

  // Query rows of a block in the lanes: which positions each sees, and its queries as pairs of dims, or as floats.
  struct Block {
    long slice, head, row, count;
    __m512i first, last;
    alignas(64) uint32_t query[MAX_DIM][LANES];
  };

  // Queries [dim][row] as float32, or [dim / 2][row] as pairs of bfloat16.
  template <int KIND>
  void read_queries(Block& b) const {
    const long dim = keys.width, wide = KIND == 0 ? 32 : 16;
    for (long i = 0; i < dim; i += wide) {
      __m512i rows[LANES];
#pragma GCC unroll 16
      for (long r = 0; r < LANES; r++) {
        if (r >= b.count) {
          rows[r] = _mm512_setzero_si512();
          continue;
        }
        const uint16_t* from = q + (b.slice * n + (b.row + r) % n) * stride + (b.head * group() + (b.row + r) / n) * dim + i;
        const __mmask32 mask = dim - i >= 32 ? ~0u : (1u << (dim - i)) - 1;
        if constexpr (KIND == 0) rows[r] = _mm512_maskz_loadu_epi16(mask, from);
        else rows[r] = (__m512i)load_bfloat16(from, __mmask16(mask));
      }
      transpose(rows);
      for (long r = 0; r < LANES; r++) _mm512_store_si512(b.query[KIND == 0 ? i / 2 + r : i + r], rows[r]);
    }
  }

  // One span for the rows of a block: their sums and, over `partial`, largest score and weight.
  // partial [query rows][partial_size()].
  template <int KIND>
  void span(Block& b, long at, float* partial) const {
    const long dv = padded(), size = partial_size();
    float* mine = partial + b.row * size;
    alignas(64) int32_t firsts[LANES], lasts[LANES];
    long from = end(b.slice), to = end(b.slice);
    for (long r = 0; r < LANES; r++) {
      firsts[r] = 1, lasts[r] = 0;
      if (r >= b.count) continue;
      const long token = (b.row + r) % n;
      firsts[r] = int32_t(first(b.slice, token)), lasts[r] = int32_t(last(b.slice, token));
      from = std::min(from, long(firsts[r]));
      float* p = mine + r * size;
      memset(p, 0, dv * 4), p[dv] = -std::numeric_limits<float>::infinity(), p[dv + 1] = 0.f;
    }
    from = from > at ? from : at, to = to < at + SPAN ? to : at + SPAN;
    if (from >= to) return;
    b.first = _mm512_load_si512(firsts), b.last = _mm512_load_si512(lasts);
    read_queries<KIND>(b);
    Floats largest = splat(-std::numeric_limits<float>::infinity()), total = splat(0.f);
    alignas(64) float weight[PAGE][LANES], shrink[LANES];
    for (long page = from / PAGE; page * PAGE < to; page++) {
      const long low = page * PAGE > from ? 0 : from - page * PAGE;
      const long high = to - page * PAGE < PAGE ? to - page * PAGE : PAGE;
      const long slot = tables[rows[b.slice] * table_stride + page] * PAGE;
      for (long j = low / TOGETHER * TOGETHER; j < high; j += TOGETHER)
        score<KIND>(b, slot + j, page * PAGE + j, weight + j);
      _mm512_store_ps(shrink, soften(weight, low, high, largest, total));
      for (long r = 0; r < b.count;) {
        const long left = b.count - r;
        float* sums = mine + r * size;
        if (left >= 8) add_values<KIND, 8>(b.head, slot, low, high, weight, shrink, r, sums), r += 8;
        else if (left >= 4) add_values<KIND, 4>(b.head, slot, low, high, weight, shrink, r, sums), r += 4;
        else if (left >= 2) add_values<KIND, 2>(b.head, slot, low, high, weight, shrink, r, sums), r += 2;
        else add_values<KIND, 1>(b.head, slot, low, high, weight, shrink, r, sums), r += 1;
      }
    }
    alignas(64) float end_largest[LANES], end_total[LANES];
    _mm512_store_ps(end_largest, largest), _mm512_store_ps(end_total, total);
    for (long r = 0; r < b.count; r++) mine[r * size + dv] = end_largest[r], mine[r * size + dv + 1] = end_total[r];
  }

  // Scores [TOGETHER][row] of the positions from `position` on, which are at `slot`; -inf where a row does not see one.
  template <int KIND>
  void score(const Block& b, long slot, long position, float (*out)[LANES]) const {
    const long dim = keys.width;
    Floats sum[TOGETHER];
#pragma GCC unroll 16
    for (int j = 0; j < TOGETHER; j++) sum[j] = splat(0.f);
    if constexpr (KIND == 0) {
      const uint16_t* k = (const uint16_t*)keys.numbers + (slot * keys.heads + b.head) * keys.stored;
      const long apart = keys.heads * keys.stored;
      for (long i = 0; i < dim; i += 2) {
        const __m512bh query = (__m512bh)_mm512_load_si512(b.query[i / 2]);
#pragma GCC unroll 16
        for (int j = 0; j < TOGETHER; j++) sum[j] = multiply_add(sum[j], query, k + j * apart + i);
      }
    } else {
      alignas(64) float k[TOGETHER][MAX_DIM / 8];
      for (long begin = 0; begin < dim; begin += MAX_DIM / 8) {
        const long stop = std::min(dim, begin + MAX_DIM / 8);
        for (long j = 0; j < TOGETHER; j++)
          for (long i = begin; i < stop; i += LANES)
            _mm512_store_ps(k[j] + i - begin, keys.load<KIND>(slot + j, b.head, i, lanes(i, dim)));
        for (long i = begin; i < stop; i++) {
          const Floats query = _mm512_load_ps(b.query[i]);
#pragma GCC unroll 16
          for (int j = 0; j < TOGETHER; j++) sum[j] = _mm512_fmadd_ps(query, splat(k[j][i - begin]), sum[j]);
        }
      }
    }
#pragma GCC unroll 16
    for (int j = 0; j < TOGETHER; j++) {
      Floats s = _mm512_mul_ps(sum[j], splat(scale));
      if (softcap > 0.f) s = capped(s, b.count);
      const __m512i at = _mm512_set1_epi32(int(position + j));
      const __mmask16 seen = _mm512_cmple_epi32_mask(b.first, at) & _mm512_cmpge_epi32_mask(b.last, at);
      _mm512_store_ps(out[j], _mm512_mask_mov_ps(splat(-std::numeric_limits<float>::infinity()), seen, s));
    }
  }

  Floats capped(Floats scores, long count) const {
    alignas(64) float s[LANES];
    _mm512_store_ps(s, scores);
    for (long r = 0; r < count; r++) s[r] = std::tanh(s[r] / softcap) * softcap;
    return _mm512_load_ps(s);
  }

  // Scores of a page to weights; returns by what the sums before shrink, to the largest score so far.
  static Floats soften(float (*score)[LANES], long low, long high, Floats& largest, Floats& total) {
    const Floats before = largest, none = splat(-std::numeric_limits<float>::infinity());
    for (long j = low; j < high; j++) largest = _mm512_max_ps(largest, _mm512_load_ps(score[j]));
    // of a row that has seen nothing yet: -inf less -inf would be no number
    const Floats least = _mm512_mask_mov_ps(largest, _mm512_cmp_ps_mask(largest, none, _CMP_EQ_OQ), splat(0.f));
    const Floats shrink = exponential(_mm512_sub_ps(before, least));
    total = _mm512_mul_ps(total, shrink);
    for (long j = low; j < high; j++) {
      const Floats weight = exponential(_mm512_sub_ps(_mm512_load_ps(score[j]), least));
      _mm512_store_ps(score[j], weight);
      total = _mm512_add_ps(total, weight);
    }
    return shrink;
  }

  // sums [R][partial_size()] of rows `r` of a block: shrunk, and the page's values times their weights.
  template <int KIND, int R>
  void add_values(long head, long slot, long low, long high, const float (*weight)[LANES], const float* shrink, long r,
                  float* sums) const {
    constexpr int V = R == 8 ? 2 : 4;
    long i = 0;
    for (; i + V * LANES <= padded(); i += V * LANES)
      add_columns<KIND, R, V>(head, slot, low, high, weight, shrink, r, i, sums + i);
    for (; i < padded(); i += LANES) add_columns<KIND, R, 1>(head, slot, low, high, weight, shrink, r, i, sums + i);
  }

  template <int KIND, int R, int V>
  void add_columns(long head, long slot, long low, long high, const float (*weight)[LANES], const float* shrink,
                   long row, long i, float* sums) const {
    const long size = partial_size();
    __mmask16 mask[V];
    Floats sum[R][V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      mask[v] = lanes(i + v * LANES, values.width);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        sum[r][v] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * size + v * LANES), splat(shrink[row + r]));
    }
    for (long j = low; j < high; j++) {
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const Floats value = values.load<KIND>(slot + j, head, i + v * LANES, mask[v]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r][v] = _mm512_fmadd_ps(splat(weight[j][row + r]), value, sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) _mm512_storeu_ps(sums + r * size + v * LANES, sum[r][v]);
  }

  // Spans of a query row, in order, to its result.  They lie `apart` numbers from each other.
  void merge(long slice, long head, long row, const float* partial, long spans, long apart) const {
    const long dv = padded();
    float largest = -std::numeric_limits<float>::infinity(), total = 0.f;
    for (long s = 0; s < spans; s++) largest = std::max(largest, partial[s * apart + dv]);
    alignas(64) float sum[MAX_DIM] = {};
    for (long s = 0; s < spans; s++) {
      const float* p = partial + s * apart;
      if (p[dv + 1] == 0.f) continue;
      const float factor = std::exp(p[dv] - largest);
      total += factor * p[dv + 1];
      for (long i = 0; i < dv; i += LANES)
        _mm512_store_ps(sum + i, _mm512_fmadd_ps(splat(factor), _mm512_loadu_ps(p + i), _mm512_load_ps(sum + i)));
    }
    const long token = row % n, h = head * group() + row / n;
    uint16_t* to = out + ((slice * n + token) * heads + h) * values.width;
    for (long i = 0; i < values.width; i += LANES)
      store_bfloat16(to + i, lanes(i, values.width), _mm512_mul_ps(_mm512_load_ps(sum + i), splat(1.f / total)));
  }

  template <int KIND>
  void run(std::vector<float>& memory) const {
    long spans = 1;
    for (long b = 0; b < slices; b++) spans = std::max(spans, (end(b) + SPAN - 1) / SPAN);
    const long count = query_rows(), size = partial_size(), tasks = slices * keys.heads * spans;
    memory.resize(tasks * count * size);
    float* partial = memory.data();
#pragma omp parallel if (tasks > 1 && tasks * count * SPAN * values.width > PARALLEL_NUMBERS)
    {
#pragma omp for schedule(dynamic)
      for (long task = 0; task < tasks; task++)
        for (long row = 0; row < count; row += LANES) {
          Block b;
          b.slice = task / spans / keys.heads, b.head = task / spans % keys.heads;
          b.row = row, b.count = std::min(count - row, long(LANES));
          span<KIND>(b, task % spans * SPAN, partial + task * count * size);
        }
#pragma omp for
      for (long all = 0; all < slices * keys.heads * count; all++) {
        const long row = all % count, which = all / count;
        merge(which / keys.heads, which % keys.heads, row, partial + (which * spans * count + row) * size, spans,
              count * size);
      }
    }
  }
};
