#include "kernels/linear_loss/linear_cross_entropy.h"

#include <string>

#include "common/half_host.h"
#include "common/vectorize.h"

namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;

// Free functions, one a pair of dtypes: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_LINEAR_FINISH(In, Out, Math)                                                   \
  WARPSMITH_VECTORIZE void finish(const In* x, Out* out, int64_t count, Math factor) {           \
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<Out>(Math(to_float(x[i])) * factor); \
  }
#define WARPSMITH_LINEAR_FINISH_INTO_SUM(T, Math)                                         \
  WARPSMITH_VECTORIZE void finish_into_sum(T* x, Math* sum, int64_t count, Math factor) { \
    for (int64_t i = 0; i < count; ++i) {                                                 \
      sum[i] += Math(to_float(x[i])) * factor;                                            \
      x[i] = from_float<T>(Math(0));                                                      \
    }                                                                                     \
  }
WARPSMITH_LINEAR_FINISH(float, float, float)
WARPSMITH_LINEAR_FINISH(float, float16, float)
WARPSMITH_LINEAR_FINISH(float, bfloat16, float)
WARPSMITH_LINEAR_FINISH(float16, float16, float)
WARPSMITH_LINEAR_FINISH(bfloat16, bfloat16, float)
WARPSMITH_LINEAR_FINISH(double, double, double)
WARPSMITH_LINEAR_FINISH_INTO_SUM(float, float)
WARPSMITH_LINEAR_FINISH_INTO_SUM(float16, float)
WARPSMITH_LINEAR_FINISH_INTO_SUM(bfloat16, float)
WARPSMITH_LINEAR_FINISH_INTO_SUM(double, double)
#undef WARPSMITH_LINEAR_FINISH
#undef WARPSMITH_LINEAR_FINISH_INTO_SUM

template <class Math> Math factor_of(const LinearFinishParams& p) {
  const Math factor = *static_cast<const Math*>(p.factor);
  if (!p.denominator) return factor;
  const Math denominator = *static_cast<const Math*>(p.denominator);
  return denominator == Math(0) ? factor : factor / denominator;
}

template <class In, class Out, class Math> Status run(const LinearFinishParams& p, const Parallel& parallel) {
  const Math factor = factor_of<Math>(p);
  if (!p.sum && p.out == p.x && factor == Math(1)) return {};
  In* x = static_cast<In*>(p.x);
  parallel(p.count, kGrainElems, [&](int64_t begin, int64_t end) {
    if (p.sum)
      finish_into_sum(x + begin, static_cast<Math*>(p.sum) + begin, end - begin, factor);
    else
      finish(x + begin, static_cast<Out*>(p.out) + begin, end - begin, factor);
  });
  return {};
}

}  // namespace

Status linear_finish_cpu(const LinearFinishParams& p, const Parallel& parallel) {
  switch (p.dtype) {
    case Dtype::float64:
      if (p.out_dtype == Dtype::float64) return run<double, double, double>(p, parallel);
      break;
    case Dtype::float32:
      if (p.out_dtype == Dtype::float32) return run<float, float, float>(p, parallel);
      if (p.out_dtype == Dtype::float16) return run<float, float16, float>(p, parallel);
      if (p.out_dtype == Dtype::bfloat16) return run<float, bfloat16, float>(p, parallel);
      break;
    case Dtype::float16:
      if (p.out_dtype == Dtype::float16) return run<float16, float16, float>(p, parallel);
      break;
    case Dtype::bfloat16:
      if (p.out_dtype == Dtype::bfloat16) return run<bfloat16, bfloat16, float>(p, parallel);
      break;
  }
  return Status::unsupported(std::string("no CPU kernel from ") + name(p.dtype) + " to " + name(p.out_dtype));
}

}  // namespace warpsmith
