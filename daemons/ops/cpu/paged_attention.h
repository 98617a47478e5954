// Attention of short slices over pages of 64 positions in place.  Arithmetic is float32.
//
// Sixteen positions are the lanes of scores and weights, so that few query rows take little time.  Positions are taken
// in spans of SPAN from 0 on, pages one by one: a row's bits depend on what it sees, neither on the rows beside it nor
// on the number of threads.
#pragma once
#include <vector>

#include "vectors.h"
#include "parallel.h"

constexpr long PAGE = 64, SPAN = 1024, MAX_DIM = 1024, PARALLEL_NUMBERS = 1 << 16;
constexpr long ROWS = 16;  // query rows of a kv head that are taken together

// Numbers of pages [position][head][width], as bfloat16, float32, float16 or q8_0 (codes and a half scale for 32).
struct Pages {
  const uint8_t* numbers;
  const uint16_t* scales;
  long kind, heads, width, stored;  // stored: numbers a head takes in memory

  template <int KIND>
  Floats load(long slot, long head, long i, Mask mask) const {
    const long at = (slot * heads + head) * stored + i;
    if constexpr (KIND == 0) return load_bfloat16((const uint16_t*)numbers + at, mask);
    if constexpr (KIND == 1) return ::load((const float*)numbers + at, mask);
    if constexpr (KIND == 2) return load_half((const uint16_t*)numbers + at, mask);
    return to_floats(load_signed_bytes(numbers + at, mask)) * splat(_cvtsh_ss(scales[at / 32]));
  }
};

// The numbers of a position, which are read soon and may be far from the cache.
template <int KIND>
void prefetch(const Pages& pages, long slot, long head) {
  constexpr long bytes = KIND == 1 ? 4 : KIND == 3 ? 1 : 2;
  const uint8_t* from = pages.numbers + (slot * pages.heads + head) * pages.stored * bytes;
  for (long i = 0; i < pages.stored * bytes; i += 64) _mm_prefetch(from + i, _MM_HINT_T0);
}

struct PagedAttention {
  const uint16_t* q;  // [slices n][heads][dim], rows `stride` apart
  Pages keys, values;
  const int32_t* tables;                 // [..][table_stride]
  const int64_t *rows, *starts, *lows;   // [slices]; lows may be null
  const float* sinks;  // [heads], logits of one more key each, whose value is zero, in the first span; may be null
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

  // Numbers of a row of partial sums: those of the values, then a vector with the largest score and the sum of weights.
  long padded() const { return (values.width + LANES - 1) / LANES * LANES; }
  long partial_size() const { return padded() + LANES; }

  // Some query rows of a kv head: the positions that each sees, from `first` to `last`, and its queries.
  struct Block {
    long slice, head, row, count;
    int32_t first[ROWS], last[ROWS];
    alignas(64) uint32_t query[MAX_DIM][ROWS];  // pairs of dims, or floats
  };

  // Scores, then weights, of a page's positions by row, and what a row has seen so far: its largest score and the sums
  // of weights in each lane.
  struct Scores {
    alignas(64) float weight[ROWS][PAGE], shrink[ROWS], least[ROWS], largest[ROWS];
    Floats total[ROWS];
  };

  // Whether queries and keys of pages of a kind are multiplied as pairs of bfloat16, else as floats.
  template <int KIND>
  static constexpr bool PAIRED = PAIRS && KIND == 0;

  // Queries [dim][row] as float32, or [dim / 2][row] as pairs of bfloat16.
  template <int KIND>
  void read_queries(Block& b) const {
    const long dim = keys.width, wide = PAIRED<KIND> ? 32 : 16;
    for (long i = 0; i < dim; i += wide) {
      Ints rows[LANES];
#pragma GCC unroll 16
      for (long r = 0; r < LANES; r++) {
        if (r >= b.count) {
          rows[r] = no_ints();
          continue;
        }
        const long token = (b.row + r) % n, h = b.head * group() + (b.row + r) / n;
        rows[r] = words<KIND>(q + (b.slice * n + token) * stride + h * dim + i, dim - i);
      }
      transpose(rows);
      for (long r = 0; r < LANES; r++) store_ints(b.query[PAIRED<KIND> ? i / 2 + r : i + r], rows[r]);
    }
  }

  // Sixteen pairs of bfloat16 or floats, of which `left` numbers count.
  template <int KIND>
  static Ints words(const uint16_t* from, long left) {
    if constexpr (PAIRED<KIND>) return load_bfloat16_pairs(from, left);
    else return as_ints(load_bfloat16(from, lanes(0, left)));
  }

  // Which positions the rows of a block see; returns the first of all.
  long read_limits(Block& b) const {
    long from = end(b.slice);
    for (long r = 0; r < b.count; r++) {
      const long token = (b.row + r) % n;
      b.first[r] = int32_t(first(b.slice, token)), b.last[r] = int32_t(last(b.slice, token));
      from = std::min(from, long(b.first[r]));
    }
    return from;
  }

  // One span for the rows of a block: their sums and, over `partial`, largest score and weight.
  // partial [query rows][partial_size()].
  template <int KIND>
  void span(Block& b, long at, float* partial) const {
    const long dv = padded(), size = partial_size();
    float* mine = partial + b.row * size;
    Scores s;
    for (long r = 0; r < b.count; r++) {
      const bool sinks_here = sinks && at == 0;
      s.largest[r] = sinks_here ? sinks[b.head * group() + (b.row + r) / n] : -std::numeric_limits<float>::infinity();
      s.total[r] = splat(sinks_here ? 1.f / LANES : 0.f);  // the sum of its lanes is a weight of 1
      memset(mine + r * size, 0, dv * 4);
    }
    const long from = std::max(read_limits(b), at), to = std::min(end(b.slice), at + SPAN);
    if (from < to) read_queries<KIND>(b);
    for (long page = from / PAGE; page * PAGE < to && from < to; page++) {
      const long low = std::max(from - page * PAGE, 0L), high = std::min(to - page * PAGE, PAGE);
      const long slot = tables[rows[b.slice] * table_stride + page] * PAGE;
      for (long j = low / LANES * LANES; j < high; j += LANES) score<KIND>(b, slot + j, s, j);
      soften(b, page * PAGE, low / LANES * LANES, high, s);
      for (long r = 0; r < b.count;) {
        const long left = b.count - r;
        float* sums = mine + r * size;
        if (WIDE && left >= 8) add_values<KIND, 8>(b.head, slot, low, high, s, r, sums), r += 8;
        else if (left >= 4) add_values<KIND, 4>(b.head, slot, low, high, s, r, sums), r += 4;
        else if (left >= 2) add_values<KIND, 2>(b.head, slot, low, high, s, r, sums), r += 2;
        else add_values<KIND, 1>(b.head, slot, low, high, s, r, sums), r += 1;
      }
    }
    for (long r = 0; r < b.count; r++)
      mine[r * size + dv] = s.largest[r], mine[r * size + dv + 1] = sum_of(s.total[r]);
  }

  // Products of queries and the keys of 16 positions from `slot` on, to column j.
  template <int KIND>
  void score(const Block& b, long slot, Scores& s, long j) const {
    const long dim = keys.width, wide = PAIRED<KIND> ? 32 : 16;
    alignas(64) Ints k[PAIRED<KIND> ? MAX_DIM / 2 : MAX_DIM];
    for (long lane = 0; lane < LANES; lane++) prefetch<KIND>(values, slot + lane, b.head);
    for (long i = 0; i < dim; i += wide) {
      Ints* part = k + i / (wide / LANES);
#pragma GCC unroll 16
      for (long lane = 0; lane < LANES; lane++) {
        const long at = ((slot + lane) * keys.heads + b.head) * keys.stored + i;
        if constexpr (PAIRED<KIND>) part[lane] = words<KIND>((const uint16_t*)keys.numbers + at, dim - i);
        else part[lane] = as_ints(keys.load<KIND>(slot + lane, b.head, i, lanes(i, dim)));
      }
      transpose(part);
    }
    if constexpr (!WIDE) {
      for (long r = 0; r < b.count; r += 4) score_rows<KIND, 4>(b, k, s, j, r);
      return;
    }
    switch ((b.count + 3) / 4) {
      case 1: return score_rows<KIND, 4>(b, k, s, j, 0);
      case 2: return score_rows<KIND, 8>(b, k, s, j, 0);
      case 3: return score_rows<KIND, 12>(b, k, s, j, 0);
      case 4: return score_rows<KIND, 16>(b, k, s, j, 0);
    }
  }

  // The same for at most R rows from `first` on, by the keys [dim] or [dim / 2] of 16 positions.  All sums are in
  // registers.
  template <int KIND, int R>
  void score_rows(const Block& b, const Ints* k, Scores& s, long j, long first) const {
    Floats sum[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sum[r] = splat(0.f);
    for (long i = 0; i < (PAIRED<KIND> ? keys.width / 2 : keys.width); i++) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        if constexpr (PAIRED<KIND>)
          sum[r] = add_pair_product(sum[r], k[i], (const uint16_t*)&b.query[i][first + r]);
        else sum[r] = add_product(as_floats(splat_int(b.query[i][first + r])), as_floats(k[i]), sum[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(s.weight[first + r] + j, sum[r]);
  }

  // Scores of 16 positions from `position` on for a row, from the products of its query; -inf where it sees none.
  Floats limited(Floats products, const Block& b, long row, long position) const {
    Floats x = products * splat(scale);
    if (softcap > 0.f) x = capped(x);
    const Ints at = add_ints(splat_int(int(position)), lane_numbers());
    const Floats none = splat(-std::numeric_limits<float>::infinity());
    return select_between(at, b.first[row], b.last[row], x, none);
  }

  Floats capped(Floats scores) const {
    alignas(64) float s[LANES];
    store(s, scores);
    for (float& one : s) one = std::tanh(one / softcap) * softcap;
    return load(s);
  }

  // Products of the page that begins at `position` to weights, and by what the sums before shrink.
  void soften(const Block& b, long position, long low, long high, Scores& s) const {
    const float none = -std::numeric_limits<float>::infinity();
    for (long r = 0; r < b.count; r++) {
      Floats largest = splat(none);
      for (long j = low; j < high; j += LANES) {
        const Floats score = limited(load(s.weight[r] + j), b, r, position + j);
        store(s.weight[r] + j, score);
        largest = maximum(largest, score);
      }
      const float before = s.largest[r];
      s.largest[r] = std::max(before, largest_of(largest));
      // of a row that has seen nothing yet: -inf less -inf would be no number
      s.least[r] = s.largest[r] == none ? 0.f : s.largest[r];
      s.shrink[r] = before - s.least[r];
    }
    store(s.shrink, exponential(load(s.shrink)));
    for (long r = 0; r < b.count; r++) {
      Floats total = s.total[r] * splat(s.shrink[r]);
      for (long j = low; j < high; j += LANES) {
        const Floats weight = exponential(load(s.weight[r] + j) - splat(s.least[r]));
        store(s.weight[r] + j, weight);
        total = total + weight;
      }
      s.total[r] = total;
    }
  }

  // sums [R][partial_size()] of rows `r` of a block: shrunk, and the page's values times their weights.
  template <int KIND, int R>
  void add_values(long head, long slot, long low, long high, const Scores& s, long r, float* sums) const {
    constexpr int V = WIDE ? (R == 8 ? 2 : 4) : 4 / R;  // so that sums are in registers
    long i = 0;
    for (; i + V * LANES <= values.width; i += V * LANES)
      add_columns<KIND, R, V>(head, slot, low, high, s, r, i, sums + i);
    for (; i < padded(); i += LANES) add_columns<KIND, R, 1>(head, slot, low, high, s, r, i, sums + i);
  }

  template <int KIND, int R, int V>
  void add_columns(long head, long slot, long low, long high, const Scores& s, long row, long i, float* sums) const {
    const long size = partial_size();
    Mask mask[V];
    Floats sum[R][V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      mask[v] = V > 1 ? 0xffff : lanes(i, values.width);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        sum[r][v] = load(sums + r * size + v * LANES) * splat(s.shrink[row + r]);
    }
    const float* weight = s.weight[row] + low;
    for (long j = low; j < high; j++, weight++) {
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const Floats value = values.load<KIND>(slot + j, head, i + v * LANES, mask[v]);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sum[r][v] = add_product(splat(weight[r * PAGE]), value, sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) store(sums + r * size + v * LANES, sum[r][v]);
  }

  // Spans of a query row, in order, to its result.  They lie `apart` numbers from each other.
  void merge(long slice, long head, long row, const float* partial, long spans, long apart) const {
    const long dv = padded();
    float largest = -std::numeric_limits<float>::infinity(), total = 0.f;
    for (long s = 0; s < spans; s++) largest = std::max(largest, partial[s * apart + dv]);
    alignas(64) float sum[MAX_DIM];
    memset(sum, 0, dv * 4);
    for (long s = 0; s < spans; s++) {
      const float* p = partial + s * apart;
      if (p[dv + 1] == 0.f) continue;
      const float factor = std::exp(p[dv] - largest);
      total += factor * p[dv + 1];
      for (long i = 0; i < dv; i += LANES)
        store(sum + i, add_product(splat(factor), load(p + i), load(sum + i)));
    }
    const long token = row % n, h = head * group() + row / n;
    uint16_t* to = out + ((slice * n + token) * heads + h) * values.width;
    for (long i = 0; i < values.width; i += LANES)
      store_bfloat16(to + i, lanes(i, values.width), load(sum + i) * splat(1.f / total));
  }

  template <int KIND>
  void run(std::vector<Line>& memory) const {
    long spans = 1;
    for (long b = 0; b < slices; b++) spans = std::max(spans, (end(b) + SPAN - 1) / SPAN);
    const long count = query_rows(), size = partial_size(), tasks = slices * keys.heads * spans;
    memory.resize(tasks * count * size / LANES);
    float* partial = memory.data()->x;
    const bool pays = tasks > 1 && tasks * count * SPAN * values.width > PARALLEL_NUMBERS;
    parallel_for<true>(pays, tasks, [&](long task) {
      for (long row = 0; row < count; row += ROWS) {
        Block b;
        b.slice = task / spans / keys.heads, b.head = task / spans % keys.heads;
        b.row = row, b.count = std::min(count - row, ROWS);
        span<KIND>(b, task % spans * SPAN, partial + task * count * size);
      }
    });
    parallel_for(pays, slices * keys.heads * count, [&](long all) {
      const long row = all % count, which = all / count;
      merge(which / keys.heads, which % keys.heads, row, partial + (which * spans * count + row) * size, spans,
            count * size);
    });
  }
};
