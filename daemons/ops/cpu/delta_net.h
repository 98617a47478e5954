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
  float* mixed;   // [slices n][channels], scratch, which the entry point allocates
  long y_stride, slices, n, n_key, n_value, dim, width;
  float norm_eps;

  long channels() const { return (2 * n_key + n_value) * dim; }

  // What one token does to a state: keys by key head, errors and decays by value head, up to a multiple of four.
  long update_width() const { return (n_key + n_value) * dim + (n_value + 3) / 4 * 4; }

  // Whether rows of a slice get updates instead of states: if all of several tokens have one.
  bool keeps_updates(long slice) const { return 1 < n && n <= MAX_TOKENS && kept[slice * n] >= 0; }

  // The row for the state after a token of a slice, or -1.
  int64_t target(long slice, long token) const {
    if (n <= MAX_TOKENS) return kept[slice * n + token];
    return token + 1 < n ? -1 : ids[slice];
  }

  // The convolution of 16 channels of a slice, and its silu.
  void convolve(long slice, long channel) const {
    const long c = channels(), left = width - 1;
    Floats window[MAX_CONV_WIDTH];
    const float* before = windows + ids[slice] * left * c + channel;
    for (long i = 0; i < left; i++) window[i] = _mm512_loadu_ps(before + i * c);
    for (long token = 0; token < n; token++) {
      const long row = slice * n + token;
      window[left] = load_bfloat16(y + row * y_stride + channel);
      Floats sum = splat(0.f);
      for (long j = 0; j < width; j++)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(conv_weight + j * c + channel), window[j], sum);
      _mm512_storeu_ps(mixed + row * c + channel, silu(sum));
      for (long i = 0; i < left; i++) window[i] = window[i + 1];
      const int64_t to = target(slice, token);
      if (to < 0) continue;
      for (long i = 0; i < left; i++) _mm512_storeu_ps(windows + (to * left + i) * c + channel, window[i]);
    }
  }

  // A query or key times `scale` over its l2 norm.
  void normalise(const float* x, float scale, float* result) const {
    Floats squares = splat(0.f);
    for (long i = 0; i < dim; i += LANES) {
      const Floats a = _mm512_loadu_ps(x + i);
      squares = _mm512_fmadd_ps(a, a, squares);
    }
    const float l2 = 1.f / std::sqrt(float(dim));
    const Floats factor = splat(rms_factor(squares, dim, 1e-6f / float(dim)) * l2 * scale);
    for (long i = 0; i < dim; i += LANES) _mm512_storeu_ps(result + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
  }

  // What some tokens of a slice bring to one value head, whatever its state.
  template <int D>
  struct Tokens {
    alignas(64) float q[MAX_TOKENS][D], k[MAX_TOKENS][D], o[MAX_TOKENS][D];
    float decay[MAX_TOKENS], beta[MAX_TOKENS], qk[MAX_TOKENS];
  };

  template <int D>
  void read_tokens(long first_row, long n_tokens, long head, Tokens<D>& t) const {
    const long c = channels(), key = head % n_key;
    for (long token = 0; token < n_tokens; token++) {
      const long row = first_row + token;
      normalise(mixed + row * c + key * D, 1.f / std::sqrt(float(D)), t.q[token]);
      normalise(mixed + row * c + (n_key + key) * D, 1.f, t.k[token]);
      Floats product = splat(0.f);
      for (long i = 0; i < D; i += LANES)
        product = _mm512_fmadd_ps(_mm512_load_ps(t.q[token] + i), _mm512_load_ps(t.k[token] + i), product);
      t.qk[token] = _mm512_reduce_add_ps(product);
      const uint16_t* gates = y + row * y_stride + c + n_value * D + head;
      t.decay[token] = std::exp(softplus(one_bfloat16(gates[0]) + dt_bias[head]) * decay_rates[head]);
      t.beta[token] = sigmoid(one_bfloat16(gates[n_value]));
    }
  }

  // Some columns of a state.
  struct Columns {
    float* x;
    long stride;
  };

  // One token's update of V vectors of columns of a state: S decay + k error, and the sums S k and S q of the token
  // after it.
  template <int V, int D>
  static void update(Columns from, Columns to, float decay, const Floats* error, const float* k, const float* k_next,
                     const float* q_next, Floats* sk, Floats* sq) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sk[v] = sq[v] = splat(0.f);
    for (long i = 0; i < D; i++) {
      const Floats key = in_register(k[i]), key_next = in_register(k_next[i]), query_next = in_register(q_next[i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const Floats s = _mm512_mul_ps(_mm512_loadu_ps(from.x + i * from.stride + 16 * v), splat(decay));
        const Floats next = _mm512_fmadd_ps(key, error[v], s);
        _mm512_storeu_ps(to.x + i * to.stride + 16 * v, next);
        sk[v] = _mm512_fmadd_ps(key_next, next, sk[v]);
        sq[v] = _mm512_fmadd_ps(query_next, next, sq[v]);
      }
    }
  }

  // What a token does to a head's columns, and the keys and decays once.
  template <int V, int D>
  void keep_update(int64_t row, long head, long column, const Tokens<D>& t, long token, const Floats* error) const {
    float* update = updates + row * update_width();
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) _mm512_storeu_ps(update + (n_key + head) * D + column + 16 * v, error[v]);
    if (column) return;
    update[(n_key + n_value) * D + head] = t.decay[token];
    if (head < n_key) memcpy(update + head * D, t.k[token], sizeof(t.k[token]));
  }

  // Tokens of a slice from `first` on for V vectors of columns of a value head's state.  With error = beta (value -
  // decay S k), the output S' q is decay S q + (q k) error, so that each token passes over the state once.  `scratch`:
  // the columns of a state that is not kept, which adjoin so that they fit into the cache.
  template <int V, int D>
  void recur_columns(long slice, long head, long column, long first, long n_tokens, Tokens<D>& t,
                     float* scratch) const {
    const Columns kept_not{scratch, 16 * V};
    const bool keeps = keeps_updates(slice);
    const auto in_pool = [&](int64_t row) { return Columns{states + (row * n_value + head) * D * D + column, D}; };
    Columns from = first ? kept_not : in_pool(ids[slice]);
    Floats sk[V], sq[V], error[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sk[v] = sq[v] = splat(0.f);
    for (long i = 0; i < D; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const Floats s = _mm512_loadu_ps(from.x + i * from.stride + 16 * v);
        sk[v] = _mm512_fmadd_ps(splat(t.k[0][i]), s, sk[v]);
        sq[v] = _mm512_fmadd_ps(splat(t.q[0][i]), s, sq[v]);
      }
    for (long token = 0; token < n_tokens; token++) {
      const long row = slice * n + first + token, after = token + 1 < n_tokens ? token + 1 : token;
      const Floats decay = splat(t.decay[token]), beta = splat(t.beta[token]), qk = splat(t.qk[token]);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        const float* value = mixed + row * channels() + 2 * n_key * D + head * D + column + 16 * v;
        error[v] = _mm512_mul_ps(_mm512_fnmadd_ps(decay, sk[v], _mm512_loadu_ps(value)), beta);
        _mm512_store_ps(t.o[token] + column + 16 * v, _mm512_fmadd_ps(qk, error[v], _mm512_mul_ps(decay, sq[v])));
      }
      const int64_t row_to = target(slice, first + token);
      if (keeps) {
        if (row_to >= 0) keep_update<V, D>(row_to, head, column, t, token, error);
        if (token + 1 == n_tokens) return;
      }
      const Columns to = row_to < 0 || keeps ? kept_not : in_pool(row_to);
      update<V, D>(from, to, t.decay[token], error, t.k[token], t.k[after], t.q[after], sk, sq);
      from = to;
    }
  }

  // All tokens of a slice for one value head of D dims.  `scratch`: memory for a state.
  template <int D>
  void recur(long slice, long head, float* scratch) const {
    constexpr int V = D / 16 < 4 ? D / 16 : 4;
    static thread_local Tokens<D> t;
    for (long first = 0; first < n; first += MAX_TOKENS) {
      const long n_tokens = n - first < MAX_TOKENS ? n - first : MAX_TOKENS, row = slice * n + first;
      read_tokens<D>(row, n_tokens, head, t);
      for (long column = 0; column < D; column += 16 * V)
        recur_columns<V, D>(slice, head, column, first, n_tokens, t, scratch + column * D);
      for (long token = 0; token < n_tokens; token++) write_output<D>(row + token, head, t.o[token]);
    }
  }

  // The gated norm of a value head's output.
  template <int D>
  void write_output(long row, long head, const float* o) const {
    const uint16_t* z = y + row * y_stride + channels() + head * D;
    Floats squares = splat(0.f);
    for (long i = 0; i < D; i += LANES) {
      const Floats x = _mm512_load_ps(o + i);
      squares = _mm512_fmadd_ps(x, x, squares);
    }
    const Floats factor = splat(rms_factor(squares, D, norm_eps));
    for (long i = 0; i < D; i += LANES) {
      const Floats x = _mm512_mul_ps(_mm512_load_ps(o + i), factor);
      const Floats normed = _mm512_mul_ps(x, _mm512_loadu_ps(norm_weight + i));
      store_bfloat16(out + (row * n_value + head) * D + i, _mm512_mul_ps(normed, silu(load_bfloat16(z + i))));
    }
  }

  void recur(long slice, long head, float* scratch) const {
    switch (dim) {
      case 16: return recur<16>(slice, head, scratch);
      case 32: return recur<32>(slice, head, scratch);
      case 64: return recur<64>(slice, head, scratch);
      case 128: return recur<128>(slice, head, scratch);
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
    for (long i = 0; i < dim; i++)
      for (long column = 0; column < dim; column += LANES) {
        Floats s = _mm512_loadu_ps(from + i * dim + column);
        for (long t = 0; t < n; t++)
          s = _mm512_fmadd_ps(splat(k[t][i]), _mm512_loadu_ps(error[t] + column), _mm512_mul_ps(s, decay[t]));
        _mm512_storeu_ps(to + i * dim + column, s);
      }
  }
};
