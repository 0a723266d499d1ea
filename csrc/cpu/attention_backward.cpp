#include "cpu/attention_backward.h"

#include "cpu/attention_tiles.h"
#include "cpu/elementwise.h"

// Backward. A task is a stripe of the keys of one head of k: for a block of keys it goes over all queries that see it,
// and adds to dk and dv of the block, and to its own dq in the workspace, so that no two tasks write to the same place.
// The stripes' dq are added at the end. How many stripes there are depends on the problem alone.
namespace warpsmith {
namespace cpu {
namespace {

// Free functions, one an arithmetic type: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_BACKWARD_LOOPS(F)                                                                          \
  /* p = exp(scale * s - lse), ds = factor * p * (ds - delta + dlse) */                                      \
  WARPSMITH_VECTORIZE void gradients(F* __restrict__ s, F* __restrict__ ds, int64_t keys, F scale, F factor, \
                                     const F* __restrict__ lse, const F* __restrict__ delta,                 \
                                     const F* __restrict__ dlse) {                                           \
    for (int64_t n = 0; n < keys; ++n)                                                                       \
      for (int m = 0; m < kTile; ++m) {                                                                      \
        const F p = math::exp_nonpositive(s[n * kTile + m] * scale - lse[m]);                                \
        s[n * kTile + m] = p;                                                                                \
        ds[n * kTile + m] = factor * p * ((ds[n * kTile + m] - delta[m]) + dlse[m]);                         \
      }                                                                                                      \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void multiply_tile(F* __restrict__ s, const F* __restrict__ factor, int64_t keys) {    \
    for (int64_t i = 0; i < keys * kTile; ++i) s[i] *= factor[i];                                            \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void add_row(F* __restrict__ x, const F* __restrict__ y, int64_t count) {              \
    for (int64_t i = 0; i < count; ++i) x[i] += y[i];                                                        \
  }
WARPSMITH_BACKWARD_LOOPS(float)
WARPSMITH_BACKWARD_LOOPS(double)
#undef WARPSMITH_BACKWARD_LOOPS
// out[r] = dot of rows r of x and y, in the order in which product() adds: where a row sees one key, delta and the
// product of dout and v are then equal to the last bit, and their difference is 0 as it must be.
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
        k_stride_(round_up(params.problem.head_dim, kProductColumns)),
        v_stride_(round_up(params.problem.head_dim_v, kProductColumns)),
        q_columns_(static_cast<size_t>(params.problem.head_dim * kTile)),
        dout_columns_(static_cast<size_t>(params.problem.head_dim_v * kTile)),
        s_(kTile * kTile),
        ds_(kTile * kTile),
        dk_(static_cast<size_t>(kBlock * k_stride_)),
        dv_(static_cast<size_t>(kBlock * v_stride_)) {
    if (params.problem.dropout.seed) lanes_.resize(kTile * kTile);
  }

  // The blocks stripe, stripe + stripes, ... of head kv_head of sequence s, in turn for each head of q that reads it.
  void run(const SequencePair& s, int64_t kv_head, int64_t stripe) {
    const AttentionProblem& p = p_.problem;
    const int64_t ratio = p.heads_q / p.heads_k;
    for (int64_t h = kv_head * ratio; h < (kv_head + 1) * ratio; ++h)
      std::fill_n(work_.dq_of(stripe, s.of_lse(p, h)), s.q.length * work_.dq_stride, F(0));
    for (int64_t k0 = stripe * kBlock; k0 < s.k.length; k0 += work_.tasks.stripes * kBlock) {
      const int64_t keys = std::min(kBlock, s.k.length - k0);
      k_ = rows_of<T>(p_.k, s.of_k(p_.k_strides, k0, kv_head), p_.k_strides.seq, keys, p.head_dim, k_room_);
      v_ = rows_of<T>(p_.v, s.of_k(p_.v_strides, k0, kv_head), p_.v_strides.seq, keys, p.head_dim_v, v_room_);
      std::fill(dk_.begin(), dk_.end(), F(0));
      std::fill(dv_.begin(), dv_.end(), F(0));
      for (int64_t h = kv_head * ratio; h < (kv_head + 1) * ratio; ++h) queries_of(s, h, stripe, k0, keys);
      for (int64_t n = 0; n < keys; ++n) {
        narrow(dk_.data() + n * k_stride_, at<T>(p_.dk, s.of_k(p_.dk_strides, k0 + n, kv_head)), p.head_dim, F(1));
        narrow(dv_.data() + n * v_stride_, at<T>(p_.dv, s.of_k(p_.dv_strides, k0 + n, kv_head)), p.head_dim_v, F(1));
      }
    }
  }

 private:
  static constexpr F kInfinity = std::numeric_limits<F>::infinity();

  void queries_of(const SequencePair& s, int64_t head, int64_t stripe, int64_t k0, int64_t keys) {
    const AttentionProblem& p = p_.problem;
    // Query i sees key j where -window_left <= j - (i + shift) <= window_right.
    const int64_t first = p.window_right < 0 ? 0 : std::max<int64_t>(0, k0 - s.shift - p.window_right);
    const int64_t end = p.window_left < 0 ? s.q.length : std::min(s.q.length, k0 + keys - s.shift + p.window_left);
    for (int64_t q0 = first / kTile * kTile; q0 < end; q0 += kTile) {
      const int64_t queries = std::min(kTile, s.q.length - q0);
      load(s, head, q0, queries);
      for (int64_t n0 = 0; n0 < keys; n0 += kTile) {
        const TileAt t{head, q0, queries, k0 + n0, std::min(kTile, keys - n0)};
        if (sees_a_key(p, s, t)) add(s, t, n0, work_.dq_of(stripe, s.of_lse(p, head) + q0));
      }
    }
  }

  // A tile of queries: rows and columns of q and dout, and what its rows have for statistics.
  void load(const SequencePair& s, int64_t head, int64_t q0, int64_t queries) {
    const AttentionProblem& p = p_.problem;
    const int64_t q = s.of_q(p_.q_strides, q0, head), dout = s.of_q(p_.dout_strides, q0, head);
    transpose(at<T>(p_.q, q), p_.q_strides.seq, queries, p.head_dim, q_columns_.data());
    transpose(at<T>(p_.dout, dout), p_.dout_strides.seq, queries, p.head_dim_v, dout_columns_.data());
    q_ = rows_of<T>(p_.q, q, p_.q_strides.seq, queries, p.head_dim, q_room_);
    dout_ = rows_of<T>(p_.dout, dout, p_.dout_strides.seq, queries, p.head_dim_v, dout_room_);
    const F* lse = at<F>(p_.lse, s.of_lse(p, head) + q0);
    const F* delta = work_.delta + s.of_lse(p, head) + q0;
    const F* dlse = p_.dlse ? at<F>(p_.dlse, s.of_lse(p, head) + q0) : nullptr;
    for (int64_t m = 0; m < kTile; ++m) {
      // exp(s - lse) of a row without keys is 0, and so is that of a lane without a query.
      lse_[m] = m < queries && lse[m] != -kInfinity ? lse[m] : kInfinity;
      delta_[m] = m < queries ? delta[m] : F(0);
      dlse_[m] = m < queries && dlse && lse[m] != -kInfinity ? dlse[m] : F(0);
    }
  }

  void add(const SequencePair& s, const TileAt& t, int64_t n0, F* dq) {
    const AttentionProblem& p = p_.problem;
    const int64_t lanes = round_up(t.queries, kProductColumns);
    const F* k = k_.data + n0 * k_.stride;
    product({k, k_.stride, 1, q_columns_.data(), kTile, s_.data(), kTile, t.keys, lanes, p.head_dim, false});
    product({v_.data + n0 * v_.stride, v_.stride, 1, dout_columns_.data(), kTile, ds_.data(), kTile, t.keys, lanes,
             p.head_dim_v, false});
    const F scale = logits_.apply(s_.data(), s, t), keep = static_cast<F>(p.dropout.scale);
    if (p.dropout.seed) {
      dropout_tile(p, s, t, lanes_.data());
      drop(ds_.data(), lanes_.data(), t.keys, p.dropout.threshold, keep);
    }
    // dbias is the gradient by the logits; those of q and k are by the products, which is softmax_scale times more.
    const F to_products = static_cast<F>(p.softmax_scale);
    gradients(s_.data(), ds_.data(), t.keys, scale, dbias_.wanted ? F(1) : to_products, lse_, delta_, dlse_);
    if (p.dropout.seed) drop(s_.data(), lanes_.data(), t.keys, p.dropout.threshold, keep);
    if (dbias_.wanted) {
      add_bias_gradient(s, t);
      scale_logits(ds_.data(), t.keys, to_products);
    }
    if (const F* slope = logits_.slope()) multiply_tile(ds_.data(), slope, t.keys);
    product({s_.data(), kTile, 1, dout_.data, dout_.stride, dv_.data() + n0 * v_stride_, v_stride_, t.keys, v_stride_,
             t.queries, true});
    product({ds_.data(), kTile, 1, q_.data, q_.stride, dk_.data() + n0 * k_stride_, k_stride_, t.keys, k_stride_,
             t.queries, true});
    product({ds_.data(), 1, kTile, k, k_.stride, dq, work_.dq_stride, t.queries, work_.dq_stride, t.keys, true});
  }

  void add_bias_gradient(const SequencePair& s, const TileAt& t) {
    const Dtype dtype = p_.problem.bias_dtype;
    if (dbias_.needs_workspace(dtype)) return add_to(work_.dbias, dbias_.contiguous(), s, t);
    (void)visit_cpu_dtype(dtype, [&]<class E>() {
      if constexpr (sizeof(E) == sizeof(F)) {
        add_to(static_cast<F*>(p_.dbias), p_.dbias_strides, s, t);
      } else if constexpr (sizeof(E) == 2 && sizeof(F) == 4) {  // an element has one tile
        E* to = first_of(static_cast<E*>(p_.dbias), p_.dbias_strides, s, t);
        for (int64_t m = 0; m < t.queries; ++m)
          for (int64_t n = 0; n < t.keys; ++n)
            to[m * p_.dbias_strides.q + n * p_.dbias_strides.k] = from_float<E>(ds_[n * kTile + m]);
      }
    });
  }

  template <class E>
  static E* first_of(E* base, const AttentionBiasStrides& strides, const SequencePair& s, const TileAt& t) {
    return base + s.index * strides.batch + t.head * strides.head + t.q0 * strides.q + t.k0 * strides.k;
  }

  // A tile's own sums are added first, in double: one after the other to one element they would lose bits.
  void add_to(F* base, const AttentionBiasStrides& strides, const SequencePair& s, const TileAt& t) {
    F* to = first_of(base, strides, s, t);
    const int64_t queries = strides.q == 0 ? 1 : t.queries, keys = strides.k == 0 ? 1 : t.keys;
    const int64_t of_queries = strides.q == 0 ? t.queries : 1, of_keys = strides.k == 0 ? t.keys : 1;
    for (int64_t m = 0; m < queries; ++m)
      for (int64_t n = 0; n < keys; ++n) {
        double sum = 0;
        for (int64_t i = 0; i < of_queries; ++i)
          for (int64_t j = 0; j < of_keys; ++j) sum += static_cast<double>(ds_[(n + j) * kTile + m + i]);
        to[m * strides.q + n * strides.k] += static_cast<F>(sum);
      }
  }

  const AttentionBwdParams& p_;
  const Workspace<F>& work_;
  BiasGradient dbias_;
  Logits<F> logits_;
  int64_t k_stride_, v_stride_;
  std::vector<F> q_columns_, dout_columns_, s_, ds_, dk_, dv_, q_room_, dout_room_, k_room_, v_room_;
  std::vector<uint16_t> lanes_;
  RowsOf<F> q_{}, dout_{}, k_{}, v_{};
  F lse_[kTile], delta_[kTile], dlse_[kTile];
};

// A problem in float64 has a bias and a sink in float64, and no other has.
template <class E> constexpr bool kIsWide = sizeof(E) == sizeof(double);

constexpr int64_t kRowGrain = 512;  // rows of a head that a thread takes at least

// The row of a head in lse's order: its head, and where it lies in tensors of q's shape.
struct Row {
  int64_t batch, head, token;

  Row(const AttentionProblem& p, int64_t row) {
    const int64_t length = p.cu_seqlens_q ? p.total_q : p.seqlen_q, h = row / length;
    token = row % length;
    head = h % p.heads_q;
    batch = h / p.heads_q;
  }
  int64_t of(const AttentionStrides& s) const { return batch * s.batch + token * s.seq + head * s.head; }
};

// Rows [begin, end), which may be of several heads.
template <class T, class F>
void compute_delta(const AttentionBwdParams& params, const Workspace<F>& w, int64_t begin, int64_t end) {
  const AttentionProblem& p = params.problem;
  const int64_t length = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
  for (int64_t row = begin; row < end;) {
    const Row r(p, row);
    const int64_t count = std::min(end - row, length - r.token);
    dots(at<T>(params.dout, r.of(params.dout_strides)), params.dout_strides.seq,
         at<T>(params.out, r.of(params.out_strides)), params.out_strides.seq, count, p.head_dim_v, w.delta + row);
    const F* lse = at<F>(params.lse, row);
    for (int64_t i = 0; i < count; ++i) {
      // A row without keys has no gradient, whatever its incoming ones are.
      if (lse[i] == -std::numeric_limits<F>::infinity()) w.delta[row + i] = F(0);
    }
    row += count;
  }
}

// dq of a row: the sum over the stripes. Tokens behind the last packed sequence have none.
template <class T, class F>
void write_dq(const AttentionBwdParams& params, const Workspace<F>& w, int64_t row, int64_t q_end) {
  const AttentionProblem& p = params.problem;
  const Row r(p, row);
  T* dq = at<T>(params.dq, r.of(params.dq_strides));
  if (r.token >= q_end) {
    std::fill_n(dq, p.head_dim, T{});
    return;
  }
  F* sum = w.dq_of(0, row);
  for (int64_t stripe = 1; stripe < w.tasks.stripes; ++stripe) add_row(sum, w.dq_of(stripe, row), p.head_dim);
  narrow(sum, dq, p.head_dim, F(1));
}

template <class T> void clear_rest(const AttentionBwdParams& params) {
  const AttentionProblem& p = params.problem;
  const SequencePair last(p, p.batch - 1);
  for (int64_t t = last.k.start + last.k.length; t < p.total_k; ++t)
    for (int64_t h = 0; h < p.heads_k; ++h) {
      std::fill_n(at<T>(params.dk, t * params.dk_strides.seq + h * params.dk_strides.head), p.head_dim, T{});
      std::fill_n(at<T>(params.dv, t * params.dv_strides.seq + h * params.dv_strides.head), p.head_dim_v, T{});
    }
}

// Calls visit(element of dbias, element of its sum in the workspace) for all of dbias.
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
            if (lse > -std::numeric_limits<double>::infinity()) {
              const double dlse = params.dlse ? static_cast<double>(*at<F>(params.dlse, i)) : 0;
              sum += std::exp(sink - lse) * (static_cast<double>(w.delta[i]) - dlse);
            }
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
    parallel(w.rows, kRowGrain, [&](int64_t begin, int64_t end) { compute_delta<T>(params, w, begin, end); });
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
    int64_t q_end = p.seqlen_q;
    if (p.cu_seqlens_q && p.batch > 0) {
      const SequencePair last(p, p.batch - 1);
      q_end = last.q.start + last.q.length;
      clear_rest<T>(params);
    }
    parallel(w.rows, kRowGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) write_dq<T>(params, w, row, q_end);
    });
    if (params.dbias) write_dbias(params, w, parallel);
    if (params.dsink) write_dsink(params, w, parallel);
  });
}

}  // namespace warpsmith
