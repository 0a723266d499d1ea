#include "kernels/rope/rope.h"

#include <algorithm>
#include <vector>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "cpu/rotary.h"

namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;  // elements that a thread takes at least

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates. All heads of one token; x may be y.
#define WARPSMITH_ROPE(T, Math)                                                                               \
  WARPSMITH_VECTORIZE void rotate_halves(const T* x, T* y, int64_t heads, int64_t x_step, int64_t y_step,     \
                                         const Math* cos, const Math* sin, int64_t pairs) {                   \
    for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {                                           \
      WARPSMITH_INDEPENDENT_TURNS                                                                             \
      for (int64_t i = 0; i < pairs; ++i) {                                                                   \
        const Math a = to_float(x[i]), b = to_float(x[i + pairs]);                                            \
        y[i] = from_float<T>(a * cos[i] - b * sin[i]);                                                        \
        y[i + pairs] = from_float<T>(b * cos[i] + a * sin[i]);                                                \
      }                                                                                                       \
    }                                                                                                         \
  }                                                                                                           \
  WARPSMITH_VECTORIZE void rotate_neighbours(const T* x, T* y, int64_t heads, int64_t x_step, int64_t y_step, \
                                             const Math* cos, const Math* sin, int64_t pairs) {               \
    for (int64_t h = 0; h < heads; ++h, x += x_step, y += y_step) {                                           \
      WARPSMITH_INDEPENDENT_TURNS                                                                             \
      for (int64_t i = 0; i < pairs; ++i) {                                                                   \
        const Math a = to_float(x[2 * i]), b = to_float(x[2 * i + 1]);                                        \
        y[2 * i] = from_float<T>(a * cos[i] - b * sin[i]);                                                    \
        y[2 * i + 1] = from_float<T>(b * cos[i] + a * sin[i]);                                                \
      }                                                                                                       \
    }                                                                                                         \
  }
WARPSMITH_ROPE(float, float)
WARPSMITH_ROPE(double, double)
WARPSMITH_ROPE(float16, float)
WARPSMITH_ROPE(bfloat16, float)
#undef WARPSMITH_ROPE

template <class T, class Math> void rotate_token(const RopeParams& p, const void* in, void* out,
                                                 const RotaryHeads& in_layout, const RotaryHeads& out_layout,
                                                 int64_t batch, int64_t index, const Math* cos, const Math* sin) {
  const T* x = static_cast<const T*>(in) + batch * in_layout.batch_stride + index * in_layout.token_stride;
  T* y = static_cast<T*>(out) + batch * out_layout.batch_stride + index * out_layout.token_stride;
  const int64_t heads = in_layout.heads, pairs = p.shape.rotary_dim / 2;
  if (p.shape.interleaved)
    rotate_neighbours(x, y, heads, in_layout.head_stride, out_layout.head_stride, cos, sin, pairs);
  else
    rotate_halves(x, y, heads, in_layout.head_stride, out_layout.head_stride, cos, sin, pairs);
  if (p.inplace || p.shape.rotary_dim == p.shape.head_dim) return;
  for (int64_t h = 0; h < heads; ++h)
    std::copy_n(x + h * in_layout.head_stride + p.shape.rotary_dim, p.shape.head_dim - p.shape.rotary_dim,
                y + h * out_layout.head_stride + p.shape.rotary_dim);
}

// T: storage of q and k, C: of cos and sin.
template <class T, class C, class Math> void rotate(const RopeParams& p, const Parallel& parallel) {
  const C *cos = static_cast<const C*>(p.angles.cos), *sin = static_cast<const C*>(p.angles.sin);
  const int64_t pairs = p.shape.rotary_dim / 2;
  const int64_t elements = std::max<int64_t>(1, (p.q_in_layout.heads + p.k_in_layout.heads) * p.shape.head_dim);
  const Math sign = p.shape.inverse ? Math(-1) : Math(1);
  parallel(p.shape.batch * p.shape.tokens, std::max<int64_t>(1, kGrainElems / elements),
           [&](int64_t begin, int64_t end) {
             RotaryRows rows(p.angles, p.positions);
             std::vector<Math> token_cos(static_cast<size_t>(pairs)), token_sin(static_cast<size_t>(pairs));
             for (int64_t token = begin; token < end; ++token) {
               const int64_t batch = token / p.shape.tokens, index = token % p.shape.tokens;
               const int64_t row = rows(batch, index), step = p.angles.column_stride;
               for (int64_t i = 0; i < pairs; ++i) {
                 token_cos[static_cast<size_t>(i)] = to_float(cos[row + i * step]);
                 token_sin[static_cast<size_t>(i)] = sign * to_float(sin[row + i * step]);
               }
               rotate_token<T>(p, p.q, p.q_out, p.q_in_layout, p.q_out_layout, batch, index, token_cos.data(),
                               token_sin.data());
               rotate_token<T>(p, p.k, p.k_out, p.k_in_layout, p.k_out_layout, batch, index, token_cos.data(),
                               token_sin.data());
             }
           });
}

}  // namespace

Status rope_cpu(const RopeParams& p, const Parallel& parallel) {
  const bool wide = p.angles.dtype == Dtype::float32;
  switch (p.dtype) {
    case Dtype::float32: rotate<float, float, float>(p, parallel); return {};
    case Dtype::float64: rotate<double, double, double>(p, parallel); return {};
    case Dtype::float16:
      wide ? rotate<float16, float, float>(p, parallel) : rotate<float16, float16, float>(p, parallel);
      return {};
    case Dtype::bfloat16:
      wide ? rotate<bfloat16, float, float>(p, parallel) : rotate<bfloat16, bfloat16, float>(p, parallel);
      return {};
  }
  return Status::unsupported("no CPU kernel for this dtype");
}

}  // namespace warpsmith
