#include <algorithm>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "cpu/optim_loops.h"
#include "kernels/optim/average.h"
#include "kernels/optim/contraction.h"

namespace warpsmith {
namespace {

constexpr int64_t kGrainChunks = 4;  // fewer are done before another thread is awake

// Free functions, for target_clones.
#define WARPSMITH_DTYPE(P)                                                                                 \
  WARPSMITH_VECTORIZE void average_chunk(Arithmetic<P>* __restrict__ average, const P* __restrict__ value, \
                                         int64_t count, Arithmetic<P> weight) {                            \
    for (int64_t i = 0; i < count; ++i) average[i] = lerp(average[i], to_float(value[i]), weight);         \
  }
WARPSMITH_DTYPE(float)
WARPSMITH_DTYPE(float16)
WARPSMITH_DTYPE(bfloat16)
WARPSMITH_DTYPE(double)
#undef WARPSMITH_DTYPE

}  // namespace

void cpu::optim::average_values(void* averages, const void* values, Dtype dtype, int64_t count, double weight) {
  // Every dtype has a loop: the visit cannot fail.
  (void)visit_cpu_dtype(dtype, [&]<class P>() {
    using A = Arithmetic<P>;
    average_chunk(static_cast<A*>(averages), static_cast<const P*>(values), count, static_cast<A>(weight));
  });
}

Status average_cpu(const AverageParams& p, const Parallel& parallel) {
  if (p.found_inf && *p.found_inf != 0) return {};
  parallel(p.chunk_count, kGrainChunks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const AverageTensor& t = p.tensors[p.chunks[i].tensor];
      const int64_t first = int64_t{p.chunks[i].chunk} * t.chunk_elems;
      const int64_t count = std::min<int64_t>(t.chunk_elems, t.numel - first);
      const Dtype wide = t.value_dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32;
      cpu::optim::average_values(static_cast<char*>(t.average) + first * size_bytes(wide),
                                 static_cast<const char*>(t.value) + first * size_bytes(t.value_dtype), t.value_dtype,
                                 count, p.weight);
    }
  });
  return {};
}

}  // namespace warpsmith
