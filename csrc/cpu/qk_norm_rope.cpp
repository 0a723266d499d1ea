#include "kernels/rope/qk_norm_rope.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/rotary.h"

namespace warpsmith {
namespace {

constexpr int kLanes = 16;                  // independent partial sums: one AVX-512 register of floats
constexpr int64_t kGrainElems = 16 * 1024;  // elements that a thread takes at least
constexpr int64_t kMaxPartialRows = 64;  // chunks of tokens of the weights' gradients, whatever the number of threads

// Free functions, one a type: target_clones reaches neither lambdas nor templates.
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

#define WARPSMITH_ROWS(Math)                                                                                 \
  WARPSMITH_VECTORIZE Math dot(const Math* a, const Math* b, int64_t count) {                                \
    Math lane[kLanes] = {};                                                                                  \
    int64_t i = 0;                                                                                           \
    for (; i + kLanes <= count; i += kLanes)                                                                 \
      for (int k = 0; k < kLanes; ++k) lane[k] += a[i + k] * b[i + k];                                       \
    for (; i < count; ++i) lane[i % kLanes] += a[i] * b[i];                                                  \
    Math total = 0;                                                                                          \
    for (int k = 0; k < kLanes; ++k) total += lane[k];                                                       \
    return total;                                                                                            \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void scale(Math* x, Math by, int64_t count) {                                          \
    for (int64_t i = 0; i < count; ++i) x[i] *= by;                                                          \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void multiply(Math* x, const Math* by, int64_t count) {                                \
    for (int64_t i = 0; i < count; ++i) x[i] *= by[i];                                                       \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void add_product(Math* sum, const Math* a, const Math* b, int64_t count) {             \
    for (int64_t i = 0; i < count; ++i) sum[i] += a[i] * b[i];                                               \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void input_gradient(Math* g, const Math* x_hat, Math rstd, Math mean, int64_t count) { \
    for (int64_t i = 0; i < count; ++i) g[i] = rstd * (g[i] - x_hat[i] * mean);                              \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void turn_halves(Math* x, const Math* cos, const Math* sin, int64_t pairs) {           \
    WARPSMITH_INDEPENDENT_TURNS                                                                              \
    for (int64_t i = 0; i < pairs; ++i) {                                                                    \
      const Math a = x[i], b = x[i + pairs];                                                                 \
      x[i] = a * cos[i] - b * sin[i];                                                                        \
      x[i + pairs] = b * cos[i] + a * sin[i];                                                                \
    }                                                                                                        \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void turn_neighbours(Math* x, const Math* cos, const Math* sin, int64_t pairs) {       \
    WARPSMITH_INDEPENDENT_TURNS                                                                              \
    for (int64_t i = 0; i < pairs; ++i) {                                                                    \
      const Math a = x[2 * i], b = x[2 * i + 1];                                                             \
      x[2 * i] = a * cos[i] - b * sin[i];                                                                    \
      x[2 * i + 1] = b * cos[i] + a * sin[i];                                                                \
    }                                                                                                        \
  }
WARPSMITH_ROWS(float)
WARPSMITH_ROWS(double)
#undef WARPSMITH_ROWS

template <class Math> std::vector<Math> room(int64_t count) { return std::vector<Math>(static_cast<size_t>(count)); }

// The angles of one token after the other, and the rotation of a head by them.
template <class C, class Math> class Turn {
 public:
  Turn(const RotaryShape& shape, const RotaryAngles& angles, const RotaryPositions& positions)
      : shape_(shape),
        angles_(angles),
        rows_(shape, angles, positions),
        cos_(room<Math>(shape.rotary_dim / 2)),
        sin_(room<Math>(shape.rotary_dim / 2)) {}

  void look_up(int64_t batch, int64_t index) {
    const int64_t row = rows_(batch, index);
    const C *cos = static_cast<const C*>(angles_.cos) + row, *sin = static_cast<const C*>(angles_.sin) + row;
    const Math sign = shape_.inverse ? Math(-1) : Math(1);
    for (size_t i = 0; i < cos_.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) * angles_.column_stride;
      cos_[i] = to_float(cos[at]);
      sin_[i] = sign * to_float(sin[at]);
    }
  }

  void operator()(Math* head) const {
    const int64_t pairs = shape_.rotary_dim / 2;
    if (shape_.interleaved)
      turn_neighbours(head, cos_.data(), sin_.data(), pairs);
    else
      turn_halves(head, cos_.data(), sin_.data(), pairs);
  }

 private:
  const RotaryShape& shape_;
  const RotaryAngles& angles_;
  RotaryRows rows_;
  std::vector<Math> cos_, sin_;
};

int64_t start_of(const RotaryHeads& l, int64_t batch, int64_t index) {
  return batch * l.batch_stride + index * l.token_stride;
}

template <class T, class W, class C, class Math> void forward(const QkNormRopeFwdParams& p, const Parallel& parallel) {
  const int64_t dim = p.shape.head_dim;
  const int64_t elements = std::max<int64_t>(1, (p.q_layout.heads + p.k_layout.heads) * dim);
  std::vector<Math> q_weight = room<Math>(dim), k_weight = room<Math>(dim);
  widen(static_cast<const W*>(p.q_weight), q_weight.data(), dim);
  widen(static_cast<const W*>(p.k_weight), k_weight.data(), dim);
  parallel(
      p.shape.batch * p.shape.tokens, std::max<int64_t>(1, kGrainElems / elements), [&](int64_t begin, int64_t end) {
        Turn<C, Math> turn(p.shape, p.angles, p.positions);
        std::vector<Math> head = room<Math>(dim);
        const auto rotate = [&](const void* in, void* out, const RotaryHeads& in_layout, const RotaryHeads& out_layout,
                                const std::vector<Math>& weight, int64_t batch, int64_t index) {
          const T* x = static_cast<const T*>(in) + start_of(in_layout, batch, index);
          T* y = static_cast<T*>(out) + start_of(out_layout, batch, index);
          for (int64_t h = 0; h < in_layout.heads; ++h) {
            widen(x + h * in_layout.head_stride, head.data(), dim);
            const Math mean = dot(head.data(), head.data(), dim) / Math(dim);
            scale(head.data(), Math(1) / std::sqrt(mean + Math(p.eps)), dim);
            multiply(head.data(), weight.data(), dim);
            turn(head.data());
            narrow(head.data(), y + h * out_layout.head_stride, dim);
          }
        };
        for (int64_t token = begin; token < end; ++token) {
          const int64_t batch = token / p.shape.tokens, index = token % p.shape.tokens;
          turn.look_up(batch, index);
          rotate(p.q, p.q_out, p.q_layout, p.q_out_layout, q_weight, batch, index);
          rotate(p.k, p.k_out, p.k_layout, p.k_out_layout, k_weight, batch, index);
        }
      });
}

template <class T, class W, class C, class Math> void backward(const QkNormRopeBwdParams& p, const Parallel& parallel) {
  const int64_t dim = p.shape.head_dim, tokens = p.shape.batch * p.shape.tokens;
  const int64_t chunks = qk_norm_rope_partial_rows_cpu(tokens);
  Math* const partials = static_cast<Math*>(p.partials);
  std::vector<Math> q_weight = room<Math>(dim), k_weight = room<Math>(dim);
  widen(static_cast<const W*>(p.q_weight), q_weight.data(), dim);
  widen(static_cast<const W*>(p.k_weight), k_weight.data(), dim);
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    std::vector<Math> x_hat = room<Math>(dim), g = room<Math>(dim);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      Turn<C, Math> turn(p.shape, p.angles, p.positions);
      if (partials) std::fill_n(partials + chunk * 2 * dim, 2 * dim, Math(0));
      const auto gradients = [&](const void* in, const void* gradient, void* out, const RotaryHeads& in_layout,
                                 const RotaryHeads& gradient_layout, const RotaryHeads& out_layout,
                                 const std::vector<Math>& weight, Math* partial, int64_t batch, int64_t index) {
        const T* x = static_cast<const T*>(in) + start_of(in_layout, batch, index);
        const T* dy = static_cast<const T*>(gradient) + start_of(gradient_layout, batch, index);
        for (int64_t h = 0; h < in_layout.heads; ++h) {
          widen(x + h * in_layout.head_stride, x_hat.data(), dim);
          widen(dy + h * gradient_layout.head_stride, g.data(), dim);
          const Math rstd = Math(1) / std::sqrt(dot(x_hat.data(), x_hat.data(), dim) / Math(dim) + Math(p.eps));
          scale(x_hat.data(), rstd, dim);
          turn(g.data());
          if (partial) add_product(partial, g.data(), x_hat.data(), dim);
          if (!out) continue;
          multiply(g.data(), weight.data(), dim);
          input_gradient(g.data(), x_hat.data(), rstd, dot(g.data(), x_hat.data(), dim) / Math(dim), dim);
          narrow(g.data(), static_cast<T*>(out) + start_of(out_layout, batch, index) + h * out_layout.head_stride, dim);
        }
      };
      for (int64_t token = tokens * chunk / chunks; token < tokens * (chunk + 1) / chunks; ++token) {
        const int64_t batch = token / p.shape.tokens, index = token % p.shape.tokens;
        Math* partial = partials ? partials + chunk * 2 * dim : nullptr;
        turn.look_up(batch, index);
        gradients(p.q, p.dq_out, p.dq, p.q_layout, p.dq_out_layout, p.dq_layout, q_weight, partial, batch, index);
        gradients(p.k, p.dk_out, p.dk, p.k_layout, p.dk_out_layout, p.dk_layout, k_weight,
                  partial ? partial + dim : nullptr, batch, index);
      }
    }
  });
  if (!partials) return;
  for (const bool of_k : {false, true}) {
    W* to = static_cast<W*>(of_k ? p.dk_weight : p.dq_weight);
    if (!to) continue;
    std::vector<Math> total = room<Math>(dim);
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int64_t d = 0; d < dim; ++d) total[static_cast<size_t>(d)] += partials[(2 * chunk + of_k) * dim + d];
    narrow(total.data(), to, dim);
  }
}

// Calls `visit` with the storage types of activations, weights and angles, and the type of the arithmetic.
template <class Visit> Status dispatch(Dtype dtype, Dtype weight_dtype, Dtype angles_dtype, Visit&& visit) {
  const auto half = [&]<class T>(T) {
    const bool wide_weight = weight_dtype == Dtype::float32, wide_angles = angles_dtype == Dtype::float32;
    if (wide_weight)
      wide_angles ? visit(T{}, float{}, float{}, float{}) : visit(T{}, float{}, T{}, float{});
    else
      wide_angles ? visit(T{}, T{}, float{}, float{}) : visit(T{}, T{}, T{}, float{});
  };
  switch (dtype) {
    case Dtype::float32: visit(float{}, float{}, float{}, float{}); return {};
    case Dtype::float64: visit(double{}, double{}, double{}, double{}); return {};
    case Dtype::float16: half(float16{}); return {};
    case Dtype::bfloat16: half(bfloat16{}); return {};
  }
  return Status::unsupported("no CPU kernel for this dtype");
}

}  // namespace

int64_t qk_norm_rope_partial_rows_cpu(int64_t tokens) { return std::min(tokens, kMaxPartialRows); }

Status qk_norm_rope_forward_cpu(const QkNormRopeFwdParams& p, const Parallel& parallel) {
  return dispatch(p.dtype, p.weight_dtype, p.angles.dtype,
                  [&]<class T, class W, class C, class Math>(T, W, C, Math) { forward<T, W, C, Math>(p, parallel); });
}

Status qk_norm_rope_backward_cpu(const QkNormRopeBwdParams& p, const Parallel& parallel) {
  return dispatch(p.dtype, p.weight_dtype, p.angles.dtype,
                  [&]<class T, class W, class C, class Math>(T, W, C, Math) { backward<T, W, C, Math>(p, parallel); });
}

}  // namespace warpsmith
