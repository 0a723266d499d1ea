#include "kernels/linear_loss/linear_loss.h"

#include <string>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"

namespace warpsmith {
namespace {

constexpr int64_t kGrainElems = 16 * 1024;

// Free functions, one per pair of dtypes: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_FINISH(In, Out)                                                                \
  WARPSMITH_VECTORIZE void finish(const In* x, Out* out, int64_t count, Arithmetic<In> factor) { \
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<Out>(to_float(x[i]) * factor);       \
  }
#define WARPSMITH_LOOPS(T)                                                                                  \
  WARPSMITH_FINISH(T, T)                                                                                    \
  WARPSMITH_VECTORIZE void finish_into_sum(T* x, Arithmetic<T>* sum, int64_t count, Arithmetic<T> factor) { \
    for (int64_t i = 0; i < count; ++i) {                                                                   \
      sum[i] += to_float(x[i]) * factor;                                                                    \
      x[i] = from_float<T>(Arithmetic<T>(0));                                                               \
    }                                                                                                       \
  }
WARPSMITH_LOOPS(float)
WARPSMITH_LOOPS(float16)
WARPSMITH_LOOPS(bfloat16)
WARPSMITH_LOOPS(double)
WARPSMITH_FINISH(float, float16)
WARPSMITH_FINISH(float, bfloat16)
#undef WARPSMITH_FINISH
#undef WARPSMITH_LOOPS

template <class In, class Out> Status run_finish(const LinearFinishParams& p, const Parallel& parallel) {
  using Math = Arithmetic<In>;
  Math factor = *static_cast<const Math*>(p.factor);
  if (p.denominator)
    if (const Math denominator = *static_cast<const Math*>(p.denominator); denominator != 0) factor /= denominator;
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
  const bool widened = p.dtype == Dtype::float32 && size_bytes(p.out_dtype) == 2;
  if (p.dtype != p.out_dtype && !widened)
    return Status::unsupported(std::string("no CPU kernel from ") + name(p.dtype) + " to " + name(p.out_dtype));
  return visit_cpu_dtype(p.out_dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2)
      if (widened) return run_finish<float, T>(p, parallel);
    return run_finish<T, T>(p, parallel);
  });
}

}  // namespace warpsmith
