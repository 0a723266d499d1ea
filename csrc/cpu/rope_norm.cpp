#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "cpu/partial_sums.h"
#include "cpu/rope_angles.h"
#include "kernels/rope/rope.h"

namespace warpsmith {
namespace cpu {
namespace {

constexpr int kLanes = 16;               // independent partial sums: one AVX-512 register of floats
constexpr int64_t kMaxPartialRows = 64;  // chunks of tokens for the weight gradients, for any number of threads

// Free functions, one per dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_STORED(T, Math)                                        \
  WARPSMITH_VECTORIZE void widen(const T* x, Math* to, int64_t count) {  \
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(x[i]);          \
  }                                                                      \
  WARPSMITH_VECTORIZE void narrow(const Math* x, T* to, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) to[i] = from_float<T>(x[i]);     \
  }
WARPSMITH_STORED(float, float)
WARPSMITH_STORED(double, double)
WARPSMITH_STORED(float16, float)
WARPSMITH_STORED(bfloat16, float)
#undef WARPSMITH_STORED

// Inlined into the clones.
#define WARPSMITH_INLINED __attribute__((always_inline)) inline

// Adds halves as vectors: a head is so short that sixteen additions in a row would be a large part of its time.
template <class Math, int count> using Vector __attribute__((vector_size(count * sizeof(Math)))) = Math;
template <class Math, int count = kLanes> WARPSMITH_INLINED Math add_lanes(const Math* lane) {
  if constexpr (count == 4) {
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
  } else {
    Vector<Math, count / 2> low, high;
    std::memcpy(&low, lane, sizeof(low));
    std::memcpy(&high, lane + count / 2, sizeof(high));
    low += high;
    Math half[count / 2];
    std::memcpy(half, &low, sizeof(low));
    return add_lanes<Math, count / 2>(half);
  }
}

// 1 / sqrt(mean square + eps)
template <class Math, class T> WARPSMITH_INLINED Math rstd_of(const T* x, int64_t dim, Math eps) {
  Math lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes)
    for (int k = 0; k < kLanes; ++k) lane[k] += Math(to_float(x[i + k])) * Math(to_float(x[i + k]));
  for (; i < dim; ++i) lane[i % kLanes] += Math(to_float(x[i])) * Math(to_float(x[i]));
  return Math(1) / std::sqrt(add_lanes(lane) / Math(dim) + eps);
}

// All heads of one token, x_step and y_step elements apart. One function for all steps of a head: a call per step would
// cost more than the step.
#define WARPSMITH_HEADS(T, Math)                                                                                       \
  WARPSMITH_VECTORIZE void forward_heads(const T* x, T* y, int64_t heads, int64_t x_step, int64_t y_step,              \
                                         const Math* weight, int64_t dim, Math eps, bool interleaved, const Math* cos, \
                                         const Math* sin, int64_t pairs) {                                             \
    for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {                                                    \
      const Math rstd = rstd_of<Math>(x, dim, eps);                                                                    \
      if (interleaved) {                                                                                               \
        WARPSMITH_IVDEP                                                                                                \
        for (int64_t i = 0; i < pairs; ++i) {                                                                          \
          const Math a = to_float(x[2 * i]) * rstd * weight[2 * i],                                                    \
                     b = to_float(x[2 * i + 1]) * rstd * weight[2 * i + 1];                                            \
          y[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);                                                           \
          y[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);                                                       \
        }                                                                                                              \
      } else {                                                                                                         \
        WARPSMITH_IVDEP                                                                                                \
        for (int64_t i = 0; i < pairs; ++i) {                                                                          \
          const Math a = to_float(x[i]) * rstd * weight[i], b = to_float(x[i + pairs]) * rstd * weight[i + pairs];     \
          y[i] = from_float<T>(a * cos[i] - b * sin[i]);                                                               \
          y[i + pairs] = from_float<T>(b * cos[i] + a * sin[i]);                                                       \
        }                                                                                                              \
      }                                                                                                                \
      for (int64_t i = 2 * pairs; i < dim; ++i) y[i] = from_float<T>(to_float(x[i]) * rstd * weight[i]);               \
    }                                                                                                                  \
  }                                                                                                                    \
  /* g: room for a head. dx, partial: null where not wanted */                                                         \
  WARPSMITH_VECTORIZE void backward_heads(const T* x, const T* dy, T* dx, int64_t heads, int64_t x_step,               \
                                          int64_t dy_step, int64_t dx_step, const Math* weight,                        \
                                          Math* __restrict__ partial, Math* __restrict__ g, int64_t dim, Math eps,     \
                                          bool interleaved, const Math* cos, const Math* sin, int64_t pairs) {         \
    for (int64_t h = 0; h < heads; ++h, x += x_step, dy += dy_step) {                                                  \
      const Math rstd = rstd_of<Math>(x, dim, eps);                                                                    \
      if (interleaved) {                                                                                               \
        WARPSMITH_IVDEP                                                                                                \
        for (int64_t i = 0; i < pairs; ++i) {                                                                          \
          const Math a = to_float(dy[2 * i]), b = to_float(dy[2 * i + 1]);                                             \
          g[2 * i] = a * cos[i] - b * sin[i];                                                                          \
          g[2 * i + 1] = b * cos[i] + a * sin[i];                                                                      \
        }                                                                                                              \
      } else {                                                                                                         \
        WARPSMITH_IVDEP                                                                                                \
        for (int64_t i = 0; i < pairs; ++i) {                                                                          \
          const Math a = to_float(dy[i]), b = to_float(dy[i + pairs]);                                                 \
          g[i] = a * cos[i] - b * sin[i];                                                                              \
          g[i + pairs] = b * cos[i] + a * sin[i];                                                                      \
        }                                                                                                              \
      }                                                                                                                \
      for (int64_t i = 2 * pairs; i < dim; ++i) g[i] = to_float(dy[i]);                                                \
      if (partial) {                                                                                                   \
        WARPSMITH_IVDEP                                                                                                \
        for (int64_t i = 0; i < dim; ++i) partial[i] += g[i] * (to_float(x[i]) * rstd);                                \
      }                                                                                                                \
      if (!dx) continue;                                                                                               \
      Math lane[kLanes] = {};                                                                                          \
      int64_t i = 0;                                                                                                   \
      for (; i + kLanes <= dim; i += kLanes)                                                                           \
        for (int k = 0; k < kLanes; ++k) {                                                                             \
          g[i + k] *= weight[i + k];                                                                                   \
          lane[k] += g[i + k] * (to_float(x[i + k]) * rstd);                                                           \
        }                                                                                                              \
      for (; i < dim; ++i) {                                                                                           \
        g[i] *= weight[i];                                                                                             \
        lane[i % kLanes] += g[i] * (to_float(x[i]) * rstd);                                                            \
      }                                                                                                                \
      const Math mean = add_lanes(lane) / Math(dim);                                                                   \
      WARPSMITH_IVDEP                                                                                                  \
      for (int64_t c = 0; c < dim; ++c) dx[c] = from_float<T>(rstd * (g[c] - to_float(x[c]) * rstd * mean));           \
      dx += dx_step;                                                                                                   \
    }                                                                                                                  \
  }
WARPSMITH_HEADS(float, float)
WARPSMITH_HEADS(double, double)
WARPSMITH_HEADS(float16, float)
WARPSMITH_HEADS(bfloat16, float)
#undef WARPSMITH_HEADS

template <class Math> std::vector<Math> room(int64_t count) { return std::vector<Math>(static_cast<size_t>(count)); }

template <class T, class W, class C> Status norm_forward(const QkNormRopeFwdParams& p, const Parallel& parallel) {
  using Math = Arithmetic<T>;
  const int64_t dim = p.shape.head_dim;
  const int64_t elements = std::max<int64_t>(1, (p.q_layout.heads + p.k_layout.heads) * dim);
  std::vector<Math> q_weight = room<Math>(dim), k_weight = room<Math>(dim);
  widen(static_cast<const W*>(p.q_weight), q_weight.data(), dim);
  widen(static_cast<const W*>(p.k_weight), k_weight.data(), dim);
  parallel(p.shape.batch * p.shape.tokens, std::max<int64_t>(1, kRotaryGrain / elements),
           [&](int64_t begin, int64_t end) {
             TokenAngles<C, Math> angles(p.shape, p.angles, p.positions);
             for (int64_t token = begin; token < end; ++token) {
               const int64_t batch = token / p.shape.tokens, index = token % p.shape.tokens;
               angles.look_up(batch, index);
               const auto heads = [&](const void* in, void* out, const RotaryHeads& in_layout,
                                      const RotaryHeads& out_layout, const std::vector<Math>& weight) {
                 forward_heads(static_cast<const T*>(in) + start_of(in_layout, batch, index),
                               static_cast<T*>(out) + start_of(out_layout, batch, index), in_layout.heads,
                               in_layout.head_stride, out_layout.head_stride, weight.data(), dim, Math(p.eps),
                               p.shape.interleaved, angles.cos(), angles.sin(), angles.pairs);
               };
               heads(p.q, p.q_out, p.q_layout, p.q_out_layout, q_weight);
               heads(p.k, p.k_out, p.k_layout, p.k_out_layout, k_weight);
             }
           });
  return {};
}

template <class T, class W, class C> Status norm_backward(const QkNormRopeBwdParams& p, const Parallel& parallel) {
  using Math = Arithmetic<T>;
  const int64_t dim = p.shape.head_dim, tokens = p.shape.batch * p.shape.tokens;
  const int64_t chunks = qk_norm_rope_partial_rows_cpu(tokens);
  Math* const partials = static_cast<Math*>(p.partials);
  std::vector<Math> q_weight = room<Math>(dim), k_weight = room<Math>(dim);
  widen(static_cast<const W*>(p.q_weight), q_weight.data(), dim);
  widen(static_cast<const W*>(p.k_weight), k_weight.data(), dim);
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<Math> g = room<Math>(dim);
    RowSums<Math> sums(2 * dim);
    const int64_t heads_of_token = std::max(p.q_layout.heads, p.k_layout.heads);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      TokenAngles<C, Math> angles(p.shape, p.angles, p.positions);
      const int64_t first = tokens * chunk / chunks, last = tokens * (chunk + 1) / chunks;
      sums.begin(partials ? partials + chunk * 2 * dim : nullptr, (last - first) * heads_of_token);
      for (int64_t token = first; token < last; ++token) {
        const int64_t batch = token / p.shape.tokens, index = token % p.shape.tokens;
        Math* const partial = sums.next(heads_of_token);
        angles.look_up(batch, index);
        const auto heads = [&](const void* in, const void* dy, void* dx, const RotaryHeads& in_layout,
                               const RotaryHeads& dy_layout, const RotaryHeads& dx_layout,
                               const std::vector<Math>& weight, Math* sum) {
          backward_heads(static_cast<const T*>(in) + start_of(in_layout, batch, index),
                         static_cast<const T*>(dy) + start_of(dy_layout, batch, index),
                         dx ? static_cast<T*>(dx) + start_of(dx_layout, batch, index) : nullptr, in_layout.heads,
                         in_layout.head_stride, dy_layout.head_stride, dx_layout.head_stride, weight.data(), sum,
                         g.data(), dim, Math(p.eps), p.shape.interleaved, angles.cos(), angles.sin(), angles.pairs);
        };
        heads(p.q, p.dq_out, p.dq, p.q_layout, p.dq_out_layout, p.dq_layout, q_weight, partial);
        heads(p.k, p.dk_out, p.dk, p.k_layout, p.dk_out_layout, p.dk_layout, k_weight,
              partial ? partial + dim : nullptr);
      }
      sums.end();
    }
  });
  if (!partials) return {};
  for (const bool of_k : {false, true}) {
    W* const to = static_cast<W*>(of_k ? p.dk_weight : p.dq_weight);
    if (!to) continue;
    Math* const sums = partials + of_k * dim;
    add_rows(sums, chunks, 2 * dim, dim);
    narrow(sums, to, dim);
  }
  return {};
}

// visit.template operator()<T, W, C>(): activations of type T with weights of type W and angles of type C.
template <class Params, class Visit> Status dispatch(const Params& p, Visit&& visit) {
  return visit_cpu_dtypes(p.dtype, p.weight_dtype, [&]<class T, class W>() {
    if (sizeof(T) == 2 && p.angles.dtype == Dtype::float32) return visit.template operator()<T, W, float>();
    return visit.template operator()<T, W, T>();
  });
}

}  // namespace
}  // namespace cpu

int64_t qk_norm_rope_partial_rows_cpu(int64_t tokens) { return std::min(tokens, cpu::kMaxPartialRows); }

Status qk_norm_rope_forward_cpu(const QkNormRopeFwdParams& p, const Parallel& parallel) {
  return cpu::dispatch(p, [&]<class T, class W, class C>() { return cpu::norm_forward<T, W, C>(p, parallel); });
}

Status qk_norm_rope_backward_cpu(const QkNormRopeBwdParams& p, const Parallel& parallel) {
  return cpu::dispatch(p, [&]<class T, class W, class C>() { return cpu::norm_backward<T, W, C>(p, parallel); });
}

}  // namespace warpsmith
