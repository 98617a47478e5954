// Gated delta net: convolution, gates, recurrence, gated norm.  daemons/ops/delta_rule.py has the formulas.  State and
// arithmetic are float32.
//
// Any number of tokens give the bits of single steps: each token's state is computed from the one before by the same
// code.  For long slices that is faster than chunks, too: as many multiply-adds, and the state stays in the cache.
#pragma once
#include "rows.h"

constexpr long MAX_TOKENS = 16;  // at a time; of longer slices only the last state is kept, in place
constexpr long MAX_CONV_WIDTH = 8;

struct DeltaNet {
  const uint16_t* y;  // [slices n] rows of q, k, v (the channels), z, alpha, beta
  float *windows, *states, *updates;  // pools [rows][width - 1][channels], [rows][n_value][dim][dim], [rows][update_width()]
  const int64_t *ids, *kept;  // [slices] row to start from; [slices][n] row for the state after each token, or -1
  const float *conv_weight, *decay_rates, *dt_bias, *norm_weight;
  uint16_t* out;  // [slices n][n_value dim]
  float* keys;    // [slices][n_key][n][key_row()], scratch, which the entry point allocates
  long y_stride, slices, n, n_key, n_value, dim, width;
  float norm_eps;

  long channels() const { return (2 * n_key + n_value) * dim; }

  // A normalised query and key, and their product.
  long key_row() const { return 2 * dim + LANES; }
  float* key_rows(long slice, long key) const { return keys + (slice * n_key + key) * n * key_row(); }

  // What one token does to a state: keys by key head, errors and decays by value head, up to a multiple of four.
  long update_width() const { return (n_key + n_value) * dim + (n_value + 3) / 4 * 4; }

  // Whether rows of a slice get updates instead of states: if all of several tokens have one.
  bool keeps_updates(long slice) const { return 1 < n && n <= MAX_TOKENS && kept[slice * n] >= 0; }

  // The row for the state after a token of a slice, or -1.
  int64_t target(long slice, long token) const {
    if (n <= MAX_TOKENS) return kept[slice * n + token];
    return token + 1 < n ? -1 : ids[slice];
  }

  // The convolution of `dim` channels of a slice for some tokens, and its silu, to rows `apart`.
  void convolve(long slice, long first, long n_tokens, long channel, float* result, long apart) const {
    for (long i = 0; i < dim; i += LANES) {
      switch (width) {
        case 1: convolve<1>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 2: convolve<2>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 3: convolve<3>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 4: convolve<4>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 5: convolve<5>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 6: convolve<6>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 7: convolve<7>(slice, first, n_tokens, channel + i, result + i, apart); break;
        case 8: convolve<8>(slice, first, n_tokens, channel + i, result + i, apart); break;
      }
    }
  }

  // The input of 16 channels of a token, which may be one of those before the slice.
  Floats input(long slice, long token, long channel) const {
    if (token < 0) return load(windows + ((ids[slice] + 1) * (width - 1) + token) * channels() + channel);
    return load_bfloat16(y + (slice * n + token) * y_stride + channel);
  }

  // With a constant width the window stays in registers.
  template <int WIDTH>
  void convolve(long slice, long first, long n_tokens, long channel, float* result, long apart) const {
    const long c = channels();
    Floats window[WIDTH], weight[WIDTH];
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH; i++) weight[i] = load(conv_weight + i * c + channel);
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH - 1; i++) window[i] = input(slice, first + i + 1 - WIDTH, channel);
    if (!first) {  // what the next head needs is far from the cache
      const float* before = windows + ids[slice] * (WIDTH - 1) * c + channel + dim;
      for (int i = 0; i < WIDTH; i++) _mm_prefetch(conv_weight + i * c + channel + dim, _MM_HINT_T0);
      for (int i = 0; i < WIDTH - 1; i++) _mm_prefetch(before + i * c, _MM_HINT_T0);
    }
    for (long token = first; token < first + n_tokens; token++, result += apart) {
      window[WIDTH - 1] = input(slice, token, channel);
      Floats sum = splat(0.f);
#pragma GCC unroll 8
      for (int i = 0; i < WIDTH; i++) sum = add_product(weight[i], window[i], sum);
      store(result, silu(sum));
#pragma GCC unroll 8
      for (int i = 0; i < WIDTH - 1; i++) window[i] = window[i + 1];
      const int64_t to = target(slice, token);
      if (to < 0) continue;
      float* after = windows + to * (WIDTH - 1) * c + channel;
#pragma GCC unroll 8
      for (int i = 0; i < WIDTH - 1; i++) {
        // most windows of a slice are never read, so they pass by the cache
        if (n > 1) stream(after + i * c, window[i]);
        else store(after + i * c, window[i]);
      }
    }
  }

  // A query or key times `scale` over its l2 norm, in place.
  void normalise(float* x, float scale) const {
    Floats squares = splat(0.f);
    for (long i = 0; i < dim; i += LANES) {
      const Floats a = load(x + i);
      squares = add_product(a, a, squares);
    }
    const float l2 = 1.f / std::sqrt(float(dim));
    const Floats factor = splat(rms_factor(squares, dim, 1e-6f / float(dim)) * l2 * scale);
    for (long i = 0; i < dim; i += LANES) store(x + i, load(x + i) * factor);
  }

  // What the tokens of a slice bring to a key head, which several value heads read.
  void read_keys(long slice, long key) const {
    float* q = key_rows(slice, key);
    convolve(slice, 0, n, key * dim, q, key_row());
    convolve(slice, 0, n, (n_key + key) * dim, q + dim, key_row());
    for (long token = 0; token < n; token++, q += key_row()) {
      normalise(q, 1.f / std::sqrt(float(dim)));
      normalise(q + dim, 1.f);
      Floats product = splat(0.f);
      for (long i = 0; i < dim; i += LANES)
        product = add_product(load(q + i), load(q + dim + i), product);
      q[2 * dim] = sum_of(product);
    }
  }

  // Some tokens of a slice for one value head.
  template <int D>
  struct Tokens {
    alignas(64) float x[MAX_TOKENS][D];  // their values, and then their outputs
    alignas(64) float state[D * D];      // after one of them, if it is not kept: blocks of columns
    float decay[MAX_TOKENS], beta[MAX_TOKENS];
    const float* rows;  // of their key head

    const float* q(long token) const { return rows + token * (2 * D + LANES); }
    const float* k(long token) const { return q(token) + D; }
    float qk(long token) const { return q(token)[2 * D]; }
  };

  template <int D>
  void read_tokens(long slice, long first, long n_tokens, long head, Tokens<D>& t) const {
    const long c = channels();
    t.rows = key_rows(slice, head % n_key) + first * key_row();
    convolve(slice, first, n_tokens, (2 * n_key + head) * D, t.x[0], D);
    for (long token = 0; token < n_tokens; token++) {
      const uint16_t* gates = y + (slice * n + first + token) * y_stride + c + n_value * D + head;
      t.decay[token] = std::exp(softplus(one_bfloat16(gates[0]) + dt_bias[head]) * decay_rates[head]);
      t.beta[token] = sigmoid(one_bfloat16(gates[n_value]));
    }
  }

  // Some columns of a state.
  struct Columns {
    float* x;
    long stride;
  };

  // One token's update of V vectors of columns of a state: S decay + k error, and the SUMS S k and S q of the token
  // after it, if there is one.  `ahead`: columns that are read later, and may be far from the cache.  Not inlined, sums
  // would stay in memory.
  template <int V, int D, bool SUMS>
  static inline __attribute__((always_inline)) void update(Columns from, Columns to, long token, const Tokens<D>& t,
                                                           const Floats* error, Floats* sk, Floats* sq, Columns ahead) {
    const float *k = t.k(token), *k_next = t.k(token + 1), *q_next = t.q(token + 1);
    const Floats decay = splat(t.decay[token]);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sk[v] = sq[v] = splat(0.f);
    for (long i = 0; i < D; i++) {
      const Floats key = in_register(k[i]);
      const Floats key_next = SUMS ? in_register(k_next[i]) : key, query_next = SUMS ? in_register(q_next[i]) : key;
      _mm_prefetch(ahead.x + i * ahead.stride, _MM_HINT_T1);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const Floats s = load(from.x + i * from.stride + 16 * v) * decay;
        const Floats next = add_product(key, error[v], s);
        store(to.x + i * to.stride + 16 * v, next);
        if constexpr (!SUMS) continue;
        sk[v] = add_product(key_next, next, sk[v]);
        sq[v] = add_product(query_next, next, sq[v]);
      }
    }
  }

  // What a token does to a head's columns, and the keys and decays once.
  template <int V, int D>
  void keep_update(int64_t row, long head, long column, const Tokens<D>& t, long token, const Floats* error) const {
    float* update = updates + row * update_width();
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(update + (n_key + head) * D + column + 16 * v, error[v]);
    if (column) return;
    update[(n_key + n_value) * D + head] = t.decay[token];
    if (head < n_key) memcpy(update + head * D, t.k(token), D * 4);
  }

  // Tokens of a slice from `first` on for V vectors of columns of a value head's state.  With error = beta (value -
  // decay S k), the output S' q is decay S q + (q k) error, so that each token passes over the state once.  Columns of
  // a state that is not kept adjoin, so that they fit into the cache.
  template <int V, int D>
  void recur_columns(long slice, long head, long column, long first, long n_tokens, Tokens<D>& t) const {
    const Columns kept_not{t.state + column * D, 16 * V};
    const bool keeps = keeps_updates(slice);
    const auto in_pool = [&](int64_t row) { return Columns{states + (row * n_value + head) * D * D + column, D}; };
    Columns from = first ? kept_not : in_pool(ids[slice]);
    const Columns ahead{in_pool(ids[slice]).x + (head + 1 < n_value ? D * D : 0), D};
    Floats sk[V], sq[V], error[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sk[v] = sq[v] = splat(0.f);
    for (long i = 0; i < D; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const Floats s = load(from.x + i * from.stride + 16 * v);
        sk[v] = add_product(splat(t.k(0)[i]), s, sk[v]);
        sq[v] = add_product(splat(t.q(0)[i]), s, sq[v]);
      }
    for (long token = 0; token < n_tokens; token++) {
      const Floats decay = splat(t.decay[token]), beta = splat(t.beta[token]), qk = splat(t.qk(token));
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        float* x = t.x[token] + column + 16 * v;
        error[v] = subtract_product(decay, sk[v], load(x)) * beta;
        store(x, add_product(qk, error[v], decay * sq[v]));
      }
      const int64_t row_to = target(slice, first + token);
      const bool is_last = token + 1 == n_tokens;
      if (keeps) {
        if (row_to >= 0) keep_update<V, D>(row_to, head, column, t, token, error);
        if (is_last) return;
      }
      const Columns to = row_to < 0 || keeps ? kept_not : in_pool(row_to);
      const Columns next{ahead.x + token % V * LANES, D};
      if (is_last) return update<V, D, false>(from, to, token, t, error, sk, sq, next);
      update<V, D, true>(from, to, token, t, error, sk, sq, next);
      from = to;
    }
  }

  // All tokens of a slice for one value head of D dims.
  template <int D>
  void recur(long slice, long head) const {
    constexpr int V = WIDE && D / 16 < 4 ? D / 16 : WIDE ? 4 : 1;  // whose sums are in registers
    static thread_local Tokens<D> t;
    for (long first = 0; first < n; first += MAX_TOKENS) {
      const long n_tokens = n - first < MAX_TOKENS ? n - first : MAX_TOKENS, row = slice * n + first;
      read_tokens<D>(slice, first, n_tokens, head, t);
      for (long column = 0; column < D; column += 16 * V)
        recur_columns<V, D>(slice, head, column, first, n_tokens, t);
      for (long token = 0; token < n_tokens; token++) write_output<D>(row + token, head, t.x[token]);
    }
  }

  // The gated norm of a value head's output.
  template <int D>
  void write_output(long row, long head, const float* o) const {
    const uint16_t* z = y + row * y_stride + channels() + head * D;
    Floats squares = splat(0.f);
    for (long i = 0; i < D; i += LANES) {
      const Floats x = load(o + i);
      squares = add_product(x, x, squares);
    }
    const Floats factor = splat(rms_factor(squares, D, norm_eps));
    for (long i = 0; i < D; i += LANES) {
      const Floats x = load(o + i) * factor;
      const Floats normed = x * load(norm_weight + i);
      store_bfloat16(out + (row * n_value + head) * D + i, normed * silu(load_bfloat16(z + i)));
    }
  }

  void recur(long slice, long head) const {
    switch (dim) {
      case 16: return recur<16>(slice, head);
      case 32: return recur<32>(slice, head);
      case 64: return recur<64>(slice, head);
      case 128: return recur<128>(slice, head);
    }
  }
};

// States made of others and updates.
struct Updates {
  float* states;         // [layers][...][n_value][dim][dim]
  const float* updates;  // [layers][...][width]
  const int64_t* rows;   // [n]
  long n, source, target, layers, states_stride, updates_stride, n_key, n_value, dim, width;

  // One head of one layer: row `target` is row `source` after the tokens of `rows`.
  void apply(long layer, long head) const {
    const long size = n_value * dim * dim;
    const float* from = states + layer * states_stride + source * size + head * dim * dim;
    float* to = states + layer * states_stride + target * size + head * dim * dim;
    const float *k[MAX_TOKENS], *error[MAX_TOKENS];
    Floats decay[MAX_TOKENS];
    for (long t = 0; t < n; t++) {
      const float* update = updates + layer * updates_stride + rows[t] * width;
      k[t] = update + head % n_key * dim, error[t] = update + (n_key + head) * dim;
      decay[t] = splat(update[(n_key + n_value) * dim + head]);
    }
    for (long i = 0; i < dim; i++) {
      long column = 0;
      for (; column + 4 * LANES <= dim; column += 4 * LANES)
        apply<4>(from + i * dim + column, to + i * dim + column, i, column, k, error, decay);
      for (; column < dim; column += LANES)
        apply<1>(from + i * dim + column, to + i * dim + column, i, column, k, error, decay);
    }
  }

  // V vectors of row i of a head, which wait less for each other than one.
  template <int V>
  void apply(const float* from, float* to, long i, long column, const float* const* k, const float* const* error,
             const Floats* decay) const {
    Floats s[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) s[v] = load(from + 16 * v);
    for (long t = 0; t < n; t++) {
      const Floats key = in_register(k[t][i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++)
        s[v] = add_product(key, load(error[t] + column + 16 * v), s[v] * decay[t]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(to + 16 * v, s[v]);
  }
};
