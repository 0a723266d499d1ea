#include <algorithm>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "kernels/optim/rank_mean.h"

namespace warpsmith {
namespace {

constexpr int64_t kBlock = 1024;       // elements whose sums stay in the first cache while the ranks are added
constexpr int64_t kGrain = 16 * 1024;  // fewer are done before another thread is awake

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates that are not inlined.
#define WARPSMITH_DTYPE(T)                                                                                   \
  WARPSMITH_VECTORIZE void begin_sum(Arithmetic<T>* sums, const T* x, int64_t count) {                       \
    for (int64_t i = 0; i < count; ++i) sums[i] = to_float(x[i]);                                            \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void add_to_sum(Arithmetic<T>* sums, const T* x, int64_t count) {                      \
    for (int64_t i = 0; i < count; ++i) sums[i] += to_float(x[i]);                                           \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void divide(T* means, const Arithmetic<T>* sums, int64_t count, Arithmetic<T> ranks) { \
    for (int64_t i = 0; i < count; ++i) means[i] = from_float<T>(sums[i] / ranks);                           \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void round_all(T* out, const float* x, int64_t count) {                                \
    for (int64_t i = 0; i < count; ++i) out[i] = from_float<T>(static_cast<Arithmetic<T>>(x[i]));            \
  }                                                                                                          \
  WARPSMITH_VECTORIZE void widen_all(float* out, const T* x, int64_t count) {                                \
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(to_float(x[i]));                         \
  }
WARPSMITH_DTYPE(float)
WARPSMITH_DTYPE(float16)
WARPSMITH_DTYPE(bfloat16)
WARPSMITH_DTYPE(double)
#undef WARPSMITH_DTYPE

template <class T> void mean_of_block(const RankMeanParams& p, int64_t at, int64_t count) {
  Arithmetic<T> sums[kBlock];
  T rounded[kBlock];
  for (int s = 0; s < p.ranks; ++s) {
    const T* x = static_cast<const T*>(p.parts) + s * p.stride + at;
    if (p.own != nullptr && s == p.rank) {
      x = static_cast<const T*>(p.own) + at;
      if (p.own_dtype != p.dtype) {
        round_all(rounded, static_cast<const float*>(p.own) + at, count);
        x = rounded;
      }
    }
    s == 0 ? begin_sum(sums, x, count) : add_to_sum(sums, x, count);
  }
  divide(rounded, sums, count, static_cast<Arithmetic<T>>(p.ranks));
  for (int o = 0; o < p.out_count; ++o) {
    if (p.outs[o].dtype == p.dtype)
      std::copy_n(rounded, count, static_cast<T*>(p.outs[o].data) + at);
    else
      widen_all(static_cast<float*>(p.outs[o].data) + at, rounded, count);
  }
}

}  // namespace

Status rank_mean_cpu(const RankMeanParams& p, const Parallel& parallel) {
  return visit_cpu_dtype(p.dtype, [&]<class T>() {
    parallel(p.count, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; at += kBlock) mean_of_block<T>(p, at, std::min(kBlock, end - at));
    });
  });
}

}  // namespace warpsmith
