#include "cpu/attention_backward.h"

#include "cpu/attention_tiles.h"
#include "cpu/elementwise.h"

// Backward. A task is a stripe of the queries of all heads that share one key head. For each tile of queries it makes
// two passes over the keys that they see. The first pass makes probabilities, their gradients and delta, and stores
// them. The second pass adds to dq of the tile, and to the dk and dv of the stripe in the workspace, so that no two
// tasks write to the same place. The dk and dv of all stripes are summed at the end. The number of stripes depends only
// on the problem.
namespace warpsmith {
namespace cpu {
namespace {

// Free functions, one per arithmetic type, because target_clones reaches neither lambdas nor templates.
#define WARPSMITH_BACKWARD_LOOPS(F)                                                                                 \
  /* p = exp((s - lse) - rest), ds = dp - delta, and the sums over the keys of p * ds, which are sums of 8 terms */ \
  WARPSMITH_VECTORIZE void probabilities(F* __restrict__ s, F* __restrict__ ds, int64_t keys,                       \
                                         const F* __restrict__ lse, const F* __restrict__ rest,                     \
                                         const F* __restrict__ delta, F* __restrict__ sum_ds) {                     \
    for (int64_t n0 = 0; n0 < keys; n0 += 8) {                                                                      \
      F of_ds[kTile] = {};                                                                                          \
      for (int64_t n = n0; n < keys && n < n0 + 8; ++n)                                                             \
        for (int m = 0; m < kTile; ++m) {                                                                           \
          const F p = math::exp_nonpositive((s[n * kTile + m] - lse[m]) - rest[m]);                                 \
          const F difference = p == F(0) ? F(0) : ds[n * kTile + m] - delta[m];                                     \
          s[n * kTile + m] = p;                                                                                     \
          ds[n * kTile + m] = difference;                                                                           \
          of_ds[m] += p * difference;                                                                               \
        }                                                                                                           \
      for (int m = 0; m < kTile; ++m) sum_ds[m] += of_ds[m];                                                        \
    }                                                                                                               \
  }                                                                                                                 \
  /* ds = factor * p * (ds - correction + dlse) */                                                                  \
  WARPSMITH_VECTORIZE void gradients(const F* __restrict__ p, F* __restrict__ ds, int64_t keys, F factor,           \
                                     const F* __restrict__ correction, const F* __restrict__ dlse) {                \
    for (int64_t n = 0; n < keys; ++n)                                                                              \
      for (int m = 0; m < kTile; ++m)                                                                               \
        ds[n * kTile + m] = factor * p[n * kTile + m] * ((ds[n * kTile + m] - correction[m]) + dlse[m]);            \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE void multiply_tile(F* __restrict__ s, const F* __restrict__ factor, int64_t keys) {           \
    for (int64_t i = 0; i < keys * kTile; ++i) s[i] *= factor[i];                                                   \
  }                                                                                                                 \
  WARPSMITH_VECTORIZE void add_row(F* __restrict__ x, const F* __restrict__ y, int64_t count) {                     \
    for (int64_t i = 0; i < count; ++i) x[i] += y[i];                                                               \
  }
WARPSMITH_BACKWARD_LOOPS(float)
WARPSMITH_BACKWARD_LOOPS(double)
#undef WARPSMITH_BACKWARD_LOOPS
// out[r] = dot(x[r], y[r]), in the order of additions of product(). If a row sees one key, delta and dot(dout, v) then
// agree to the last bit, and their difference is 0 as it must be.
#define WARPSMITH_DOTS(T, F)                                                                                          \
  WARPSMITH_VECTORIZE void dots(const T* __restrict__ x, int64_t x_stride, const T* __restrict__ y, int64_t y_stride, \
                                int64_t rows, int64_t count, F* __restrict__ out) {                                   \
    constexpr int64_t kTogether = 8; /* rows whose chains of additions run beside each other */                       \
    for (int64_t r0 = 0; r0 < rows; r0 += kTogether) {                                                                \
      const int64_t n = rows - r0 < kTogether ? rows - r0 : kTogether;                                                \
      F total[kTogether] = {};                                                                                        \
      for (int64_t i0 = 0; i0 < count; i0 += kSegment) {                                                              \
        F sum[kTogether] = {};                                                                                        \
        for (int64_t i = i0; i < i0 + kSegment && i < count; ++i)                                                     \
          for (int64_t r = 0; r < n; ++r)                                                                             \
            sum[r] += static_cast<F>(to_float(x[(r0 + r) * x_stride + i])) * to_float(y[(r0 + r) * y_stride + i]);    \
        for (int64_t r = 0; r < n; ++r) total[r] = sum[r] + total[r];                                                 \
      }                                                                                                               \
      for (int64_t r = 0; r < n; ++r) out[r0 + r] = total[r];                                                         \
    }                                                                                                                 \
  }
WARPSMITH_DOTS(float, float)
WARPSMITH_DOTS(double, double)
WARPSMITH_DOTS(float16, float)
WARPSMITH_DOTS(bfloat16, float)
#undef WARPSMITH_DOTS

template <class T> class BackwardTask {
  using F = Arithmetic<T>;

 public:
  BackwardTask(const AttentionBwdParams& params, const Workspace<F>& workspace)
      : p_(params),
        work_(workspace),
        dbias_(params),
        logits_(params.problem),
        q_columns_(static_cast<size_t>(params.problem.head_dim * kTile)),
        dout_columns_(static_cast<size_t>(params.problem.head_dim_v * kTile)),
        dq_(static_cast<size_t>(kTile * workspace.dk_width)) {}

  // Runs the tiles stripe, stripe + stripes, ... of the queries of sequence s, for each query head that reads kv_head.
  void run(const SequencePair& s, int64_t kv_head, int64_t stripe) {
    const AttentionProblem& p = p_.problem;
    const int64_t ratio = p.heads_q / p.heads_k;
    dk_ = work_.dk_of(stripe, s.of_keys(p, kv_head));
    std::fill_n(dk_, s.k.length * work_.width, F(0));
    for (int64_t h = kv_head * ratio; h < (kv_head + 1) * ratio; ++h)
      for (int64_t q0 = stripe * kTile; q0 < s.q.length; q0 += work_.tasks.stripes * kTile)
        queries_of(s, h, kv_head, q0, std::min(kTile, s.q.length - q0));
  }

 private:
  static constexpr F kInfinity = std::numeric_limits<F>::infinity();
  static constexpr int64_t kElements = kTile * kTile;

  void queries_of(const SequencePair& s, int64_t head, int64_t kv_head, int64_t q0, int64_t queries) {
    const AttentionProblem& p = p_.problem;
    load(s, head, q0, queries);
    const AttentionKeys seen = attention_keys(p, q0, q0 + queries - 1, s.shift, s.k.length);
    const int64_t first = seen.begin / kTile * kTile;
    const auto for_tiles = [&](auto&& visit) {
      for (int64_t k0 = first, i = 0; k0 < seen.end; k0 += kTile, ++i)
        visit(TileAt{head, q0, queries, k0, std::min(kTile, s.k.length - k0)}, static_cast<size_t>(i * kElements));
    };
    const auto tiles = static_cast<size_t>(std::max<int64_t>(0, (seen.end - first + kTile - 1) / kTile));
    s_.resize(std::max(s_.size(), tiles * kElements));
    ds_.resize(s_.size());
    if (p.softcap > 0) slope_.resize(s_.size());
    if (p.dropout.seed) kept_bytes_.resize(s_.size());
    std::fill_n(sum_ds_, kTile, F(0));
    for_tiles([&](const TileAt& t, size_t at) { make_probabilities(s, t, kv_head, at); });
    correct_statistics(s, head, q0, queries);
    std::fill(dq_.begin(), dq_.end(), F(0));
    for_tiles([&](const TileAt& t, size_t at) { add(s, t, kv_head, at); });
    for (int64_t m = 0; m < queries; ++m)
      narrow(dq_.data() + m * work_.dk_width, at<T>(p_.dq, s.of_q(p_.dq_strides, q0 + m, head)), p.head_dim, F(1));
  }

  // Loads a tile of queries: q and dout by rows and by columns, and the statistics of its rows.
  void load(const SequencePair& s, int64_t head, int64_t q0, int64_t queries) {
    const AttentionProblem& p = p_.problem;
    const int64_t q = s.of_q(p_.q_strides, q0, head), dout = s.of_q(p_.dout_strides, q0, head);
    transpose(at<T>(p_.q, q), p_.q_strides.seq, queries, p.head_dim, q_columns_.data());
    transpose(at<T>(p_.dout, dout), p_.dout_strides.seq, queries, p.head_dim_v, dout_columns_.data());
    q_ = rows_of<T>(p_.q, q, p_.q_strides.seq, queries, p.head_dim, q_room_);
    dout_ = rows_of<T>(p_.dout, dout, p_.dout_strides.seq, queries, p.head_dim_v, dout_room_);
    dots(at<T>(p_.dout, dout), p_.dout_strides.seq, at<T>(p_.out, s.of_q(p_.out_strides, q0, head)), p_.out_strides.seq,
         queries, p.head_dim_v, delta_);
    const F* lse = at<F>(p_.lse, s.of_lse(p, head) + q0);
    const F* rest = p_.lse_rest ? at<F>(p_.lse_rest, s.of_lse(p, head) + q0) : nullptr;
    const F* dlse = p_.dlse ? at<F>(p_.dlse, s.of_lse(p, head) + q0) : nullptr;
    for (int64_t m = 0; m < kTile; ++m) {
      // lse = +inf makes exp(s - lse) = 0, for a row without keys and for a lane without a query. Such a row has no
      // gradient, whatever its upstream gradients are. A row with a logit of +inf becomes NaN.
      const bool seen = m < queries && lse[m] != -kInfinity;
      lse_[m] = !seen ? kInfinity : lse[m] == kInfinity ? std::numeric_limits<F>::quiet_NaN() : lse[m];
      rest_[m] = seen && rest ? rest[m] : F(0);
      delta_[m] = seen ? delta_[m] : F(0);
      dlse_[m] = seen && dlse ? dlse[m] : F(0);
    }
  }

  RowsOf<F> keys_of(const SequencePair& s, const TileAt& t, int64_t kv_head) {
    return rows_of<T>(p_.k, s.of_k(p_.k_strides, t.k0, kv_head), p_.k_strides.seq, t.keys, p_.problem.head_dim,
                      k_room_);
  }

  void make_probabilities(const SequencePair& s, const TileAt& t, int64_t kv_head, size_t place) {
    const AttentionProblem& p = p_.problem;
    const int64_t lanes = round_up(t.queries, kProductColumns);
    const RowsOf<F> k = keys_of(s, t, kv_head), v = rows_of<T>(p_.v, s.of_k(p_.v_strides, t.k0, kv_head),
                                                               p_.v_strides.seq, t.keys, p.head_dim_v, v_room_);
    F *logits = s_.data() + place, *ds = ds_.data() + place;
    product({k.data, k.stride, 1, q_columns_.data(), kTile, logits, kTile, t.keys, lanes, p.head_dim, false});
    product({v.data, v.stride, 1, dout_columns_.data(), kTile, ds, kTile, t.keys, lanes, p.head_dim_v, false});
    logits_.apply(logits, s, t);
    if (const F* slope = logits_.slope()) std::copy_n(slope, t.keys * kTile, slope_.data() + place);
    if (p.dropout.seed) {
      dropout_tile(p, s, t, kept_bytes_.data() + place);
      drop(ds, kept_bytes_.data() + place, t.keys, p.dropout.threshold, static_cast<F>(p.dropout.scale));
    }
    probabilities(logits, ds, t.keys, lse_, rest_, delta_, sum_ds_);
  }

  // delta = dot(dout, out) carries the rounding of out. In a saturated softmax dp - delta cancels, and this rounding
  // would dominate what is left. The sum over the keys of p * (dp - delta) is the error of delta, and corrects it.
  void correct_statistics(const SequencePair& s, int64_t head, int64_t q0, int64_t queries) {
    const AttentionProblem& p = p_.problem;
    const F sink = p.sink ? sink_of<F>(p, head) : -kInfinity;
    F* delta = work_.delta + s.of_lse(p, head) + q0;
    for (int64_t m = 0; m < kTile; ++m) {
      const F of_sink = sink == -kInfinity || lse_[m] == kInfinity ? F(0) : std::exp((sink - lse_[m]) - rest_[m]);
      correction_[m] = sum_ds_[m] - of_sink * delta_[m];
      if (m < queries) delta[m] = delta_[m] + correction_[m];
    }
  }

  void add(const SequencePair& s, const TileAt& t, int64_t kv_head, size_t place) {
    const AttentionProblem& p = p_.problem;
    const RowsOf<F> k = keys_of(s, t, kv_head);
    F *weights = s_.data() + place, *ds = ds_.data() + place;
    // dbias is the gradient of the logits. The gradients of q and k need that of the products, which is softmax_scale
    // times as large.
    const F to_products = static_cast<F>(p.softmax_scale);
    gradients(weights, ds, t.keys, dbias_.wanted ? F(1) : to_products, correction_, dlse_);
    if (p.dropout.seed)
      drop(weights, kept_bytes_.data() + place, t.keys, p.dropout.threshold, static_cast<F>(p.dropout.scale));
    if (dbias_.wanted) {
      add_bias_gradient(s, t, ds);
      scale_logits(ds, t.keys, to_products);
    }
    if (p.softcap > 0) multiply_tile(ds, slope_.data() + place, t.keys);
    F *dk = dk_ + t.k0 * work_.width, *dv = dk + work_.dk_width;
    const int64_t dv_width = work_.width - work_.dk_width;
    product({weights, kTile, 1, dout_.data, dout_.stride, dv, work_.width, t.keys, dv_width, t.queries, true});
    product({ds, kTile, 1, q_.data, q_.stride, dk, work_.width, t.keys, work_.dk_width, t.queries, true});
    product({ds, 1, kTile, k.data, k.stride, dq_.data(), work_.dk_width, t.queries, work_.dk_width, t.keys, true});
  }

  void add_bias_gradient(const SequencePair& s, const TileAt& t, const F* ds) {
    const Dtype dtype = p_.problem.bias_dtype;
    if (dbias_.needs_workspace(dtype)) return add_to(work_.dbias, dbias_.contiguous(), s, t, ds);
    (void)visit_cpu_dtype(dtype, [&]<class E>() {
      if constexpr (sizeof(E) == sizeof(F)) {
        add_to(static_cast<F*>(p_.dbias), p_.dbias_strides, s, t, ds);
      } else if constexpr (sizeof(E) == 2 && sizeof(F) == 4) {  // not broadcast: one tile per element
        E* to = first_of(static_cast<E*>(p_.dbias), p_.dbias_strides, s, t);
        for (int64_t m = 0; m < t.queries; ++m)
          for (int64_t n = 0; n < t.keys; ++n)
            to[m * p_.dbias_strides.q + n * p_.dbias_strides.k] = from_float<E>(ds[n * kTile + m]);
      }
    });
  }

  template <class E>
  static E* first_of(E* base, const AttentionBiasStrides& strides, const SequencePair& s, const TileAt& t) {
    return base + s.index * strides.batch + t.head * strides.head + t.q0 * strides.q + t.k0 * strides.k;
  }

  // Sums the tile's own broadcast elements first, in double. Added one by one to the same element, they would lose
  // bits.
  void add_to(F* base, const AttentionBiasStrides& strides, const SequencePair& s, const TileAt& t, const F* ds) {
    F* to = first_of(base, strides, s, t);
    const int64_t queries = strides.q == 0 ? 1 : t.queries, keys = strides.k == 0 ? 1 : t.keys;
    const int64_t of_queries = strides.q == 0 ? t.queries : 1, of_keys = strides.k == 0 ? t.keys : 1;
    for (int64_t m = 0; m < queries; ++m)
      for (int64_t n = 0; n < keys; ++n) {
        double sum = 0;
        for (int64_t i = 0; i < of_queries; ++i)
          for (int64_t j = 0; j < of_keys; ++j) sum += static_cast<double>(ds[(n + j) * kTile + m + i]);
        to[m * strides.q + n * strides.k] += static_cast<F>(sum);
      }
  }

  const AttentionBwdParams& p_;
  const Workspace<F>& work_;
  BiasGradient dbias_;
  Logits<F> logits_;
  F* dk_ = nullptr;  // dk of the current sequence and key head
  std::vector<F> q_columns_, dout_columns_, dq_, q_room_, dout_room_, k_room_, v_room_;
  std::vector<F> s_, ds_, slope_;    // for all tiles of keys that the tile of queries sees
  std::vector<uint8_t> kept_bytes_;  // dropout: a byte per weight
  RowsOf<F> q_{}, dout_{};
  F lse_[kTile], rest_[kTile], delta_[kTile], dlse_[kTile], sum_ds_[kTile], correction_[kTile];
};

// A float64 problem has a float64 bias and sink; no other problem has.
template <class E> constexpr bool kIsWide = sizeof(E) == sizeof(double);

constexpr int64_t kRowGrain = 512;  // least rows per thread

// dk and dv of one row of keys: the sums over the stripes. Tokens after the last packed sequence get 0.
template <class T, class F>
void write_keys(const AttentionBwdParams& params, const Workspace<F>& w, int64_t row, int64_t k_end) {
  const AttentionProblem& p = params.problem;
  const int64_t length = p.cu_seqlens_q ? p.total_k : p.seqlen_k, token = row % length;
  const int64_t head = row / length % p.heads_k, batch = row / length / p.heads_k;
  const auto of = [&](void* base, const AttentionStrides& s) {
    return at<T>(base, batch * s.batch + token * s.seq + head * s.head);
  };
  T *dk = of(params.dk, params.dk_strides), *dv = of(params.dv, params.dv_strides);
  if (token >= k_end) {
    std::fill_n(dk, p.head_dim, T{});
    std::fill_n(dv, p.head_dim_v, T{});
    return;
  }
  F* sum = w.dk_of(0, row);
  for (int64_t stripe = 1; stripe < w.tasks.stripes; ++stripe) add_row(sum, w.dk_of(stripe, row), w.width);
  narrow(sum, dk, p.head_dim, F(1));
  narrow(sum + w.dk_width, dv, p.head_dim_v, F(1));
}

template <class T> void clear_rest(const AttentionBwdParams& params) {
  const AttentionProblem& p = params.problem;
  const SequencePair last(p, p.batch - 1);
  for (int64_t t = last.q.start + last.q.length; t < p.total_q; ++t)
    for (int64_t h = 0; h < p.heads_q; ++h)
      std::fill_n(at<T>(params.dq, t * params.dq_strides.seq + h * params.dq_strides.head), p.head_dim, T{});
}

// Calls visit(offset in dbias, offset in its sum in the workspace) for every element of dbias.
template <class Visit> void for_bias_rows(const AttentionBwdParams& params, const Parallel& parallel, Visit&& visit) {
  const BiasGradient b(params);
  const AttentionBiasStrides& s = params.dbias_strides;
  parallel(b.sizes[0] * b.sizes[1] * b.sizes[2], std::max<int64_t>(1, 4096 / std::max<int64_t>(1, b.sizes[3])),
           [&](int64_t begin, int64_t end) {
             for (int64_t i = begin; i < end; ++i) {
               const int64_t q = i % b.sizes[2], h = i / b.sizes[2] % b.sizes[1], batch = i / b.sizes[2] / b.sizes[1];
               for (int64_t k = 0; k < b.sizes[3]; ++k)
                 visit(batch * s.batch + h * s.head + q * s.q + k * s.k, i * b.sizes[3] + k);
             }
           });
}

template <class F> void clear_dbias(const AttentionBwdParams& params, const Workspace<F>& w, const Parallel& parallel) {
  if (BiasGradient(params).needs_workspace(params.problem.bias_dtype))
    return for_bias_rows(params, parallel, [&](int64_t, int64_t i) { w.dbias[i] = F(0); });
  (void)visit_cpu_dtype(params.problem.bias_dtype, [&]<class E>() {
    for_bias_rows(params, parallel, [&](int64_t at_element, int64_t) { *at<E>(params.dbias, at_element) = E{}; });
  });
}

template <class F> void write_dbias(const AttentionBwdParams& params, const Workspace<F>& w, const Parallel& parallel) {
  if (!BiasGradient(params).needs_workspace(params.problem.bias_dtype)) return;
  (void)visit_cpu_dtype(params.problem.bias_dtype, [&]<class E>() {
    if constexpr (kIsWide<E> == kIsWide<F>)
      for_bias_rows(params, parallel, [&](int64_t at_element, int64_t i) {
        *at<E>(params.dbias, at_element) = from_float<E>(w.dbias[i]);
      });
  });
}

template <class F> void write_dsink(const AttentionBwdParams& params, const Workspace<F>& w, const Parallel& parallel) {
  const AttentionProblem& p = params.problem;
  parallel(p.heads_q, 1, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h)
      (void)visit_cpu_dtype(p.sink_dtype, [&]<class E>() {
        const double sink = static_cast<double>(to_float(*at<E>(p.sink, h)));
        double sum = 0;
        for (int64_t b = 0; b < p.batch; ++b) {
          const SequencePair s(p, b);
          for (int64_t i = s.of_lse(p, h), last = i + s.q.length; i < last; ++i) {
            const double lse = static_cast<double>(*at<F>(params.lse, i));
            if (lse == -std::numeric_limits<double>::infinity()) continue;
            const double dlse = params.dlse ? static_cast<double>(*at<F>(params.dlse, i)) : 0;
            const double rest = params.lse_rest ? static_cast<double>(*at<F>(params.lse_rest, i)) : 0;
            const double p = std::isinf(lse) ? std::numeric_limits<double>::quiet_NaN() : std::exp((sink - lse) - rest);
            sum += p * (static_cast<double>(w.delta[i]) - dlse);
          }
        }
        if constexpr (kIsWide<E> == kIsWide<F>) *at<E>(params.dsink, h) = from_float<E>(static_cast<F>(-sum));
      });
  });
}

}  // namespace
}  // namespace cpu

int64_t attention_backward_workspace_cpu(const AttentionBwdParams& params) {
  if (params.problem.dtype == Dtype::float64)
    return cpu::Workspace<double>(params).elements(params) * static_cast<int64_t>(sizeof(double));
  return cpu::Workspace<float>(params).elements(params) * static_cast<int64_t>(sizeof(float));
}

Status attention_backward_cpu(const AttentionBwdParams& params, const Parallel& parallel) {
  using namespace cpu;
  const AttentionProblem& p = params.problem;
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    using F = Arithmetic<T>;
    const Workspace<F> w(params);
    const Tasks& tasks = w.tasks;
    if (params.dbias) clear_dbias(params, w, parallel);
    const int64_t flops = p.seqlen_q * p.seqlen_k * (6 * p.head_dim + 4 * p.head_dim_v) / tasks.stripes;
    parallel(tasks.batches * tasks.heads * tasks.stripes, task_grain(flops), [&](int64_t begin, int64_t end) {
      BackwardTask<T> work(params, w);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t stripe = i % tasks.stripes, head = i / tasks.stripes % tasks.heads,
                      batch = i / tasks.stripes / tasks.heads;
        for (int64_t b = tasks.batches == 1 ? 0 : batch; b < (tasks.batches == 1 ? p.batch : batch + 1); ++b)
          for (int64_t h = tasks.heads == 1 ? 0 : head; h < (tasks.heads == 1 ? p.heads_k : head + 1); ++h)
            work.run(SequencePair(p, b), h, stripe);
      }
    });
    int64_t k_end = p.seqlen_k;
    if (p.cu_seqlens_q && p.batch > 0) {
      const SequencePair last(p, p.batch - 1);
      k_end = last.k.start + last.k.length;
      clear_rest<T>(params);
    }
    parallel(w.rows, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) write_keys<T>(params, w, row, k_end);
    });
    if (params.dbias) write_dbias(params, w, parallel);
    if (params.dsink) write_dsink(params, w, parallel);
  });
}

}  // namespace warpsmith
