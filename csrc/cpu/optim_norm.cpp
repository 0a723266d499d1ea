#include <algorithm>
#include <atomic>

#include "common/half_host.h"
#include "common/vectorize.h"
#include "common/visit_dtype.h"
#include "kernels/optim/grad_norm.h"

namespace warpsmith {
namespace {

constexpr int32_t kChunkElems = 16 * 1024;
constexpr int64_t kGrainChunks = 8;  // fewer are done before another thread is awake
constexpr int64_t kLanes = 64;       // sums side by side, whatever the processor's vectors: the order is fixed

template <NormOrder order, class A> WARPSMITH_HOST_DEVICE A add(A sum, A x) {
  const A size = x < A(0) ? -x : x;
  if constexpr (order == NormOrder::infinity) return largest(size, sum);
  return order == NormOrder::two ? sum + x * x : sum + size;
}

// Adds factor * x to kLanes interleaved sums; `sums` has kLanes elements.
template <NormOrder order, class T> WARPSMITH_HOST_DEVICE void add_lanes(const T* __restrict__ x, int64_t count,
                                                                         Arithmetic<T> factor,
                                                                         Arithmetic<T>* __restrict__ sums) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] = add<order>(sums[lane], to_float(x[i + lane]) * factor);
  for (int64_t lane = 0; lane < count - whole; ++lane)
    sums[lane] = add<order>(sums[lane], to_float(x[whole + lane]) * factor);
}

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates that are not inlined.
#define WARPSMITH_DTYPE(T)                                                                          \
  WARPSMITH_VECTORIZE void add_up(NormOrder order, const T* x, int64_t count, Arithmetic<T> factor, \
                                  Arithmetic<T>* sums) {                                            \
    if (order == NormOrder::one) return add_lanes<NormOrder::one>(x, count, factor, sums);          \
    if (order == NormOrder::two) return add_lanes<NormOrder::two>(x, count, factor, sums);          \
    add_lanes<NormOrder::infinity>(x, count, Arithmetic<T>(1), sums);                               \
  }                                                                                                 \
  WARPSMITH_VECTORIZE void scale(T* x, int64_t count, Arithmetic<T> factor) {                       \
    for (int64_t i = 0; i < count; ++i) x[i] = from_float<T>(to_float(x[i]) * factor);              \
  }                                                                                                 \
  WARPSMITH_VECTORIZE int64_t count_bad(const T* x, int64_t count, Arithmetic<T> factor) {          \
    int64_t bad = 0;                                                                                \
    for (int64_t i = 0; i < count; ++i) bad += !is_finite(to_float(x[i]) * factor);                 \
    return bad;                                                                                     \
  }
WARPSMITH_DTYPE(float)
WARPSMITH_DTYPE(float16)
WARPSMITH_DTYPE(bfloat16)
WARPSMITH_DTYPE(double)
#undef WARPSMITH_DTYPE

double combine(NormOrder order, double a, double b) { return order == NormOrder::infinity ? largest(a, b) : a + b; }

template <class T> double partial_sum(NormOrder order, const T* x, int64_t count, float factor) {
  Arithmetic<T> sums[kLanes] = {};
  add_up(order, x, count, static_cast<Arithmetic<T>>(factor), sums);
  double sum = 0;
  for (const Arithmetic<T> lane : sums) sum = combine(order, sum, static_cast<double>(lane));
  return without_factor(sum, factor, order);
}

// Calls visit(number, pointer to its elements, how many) for every chunk, on all threads.
template <class Visit> Status for_chunks(const NormTensor* tensors, const ListChunk* chunks, int64_t chunk_count,
                                         const Parallel& parallel, Visit&& visit) {
  parallel(chunk_count, kGrainChunks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const NormTensor& t = tensors[chunks[i].tensor];
      const int64_t first = int64_t{chunks[i].chunk} * t.chunk_elems;
      const int64_t count = std::min<int64_t>(t.chunk_elems, t.numel - first);
      // Every dtype has a loop: the visit cannot fail.
      (void)visit_cpu_dtype(t.dtype, [&]<class T>() { visit(i, static_cast<T*>(t.data) + first, count); });
    }
  });
  return {};
}

double sum_of_partials(const GradNormParams& p) {
  double sum = 0;
  for (int64_t i = 0; i < p.chunk_count; ++i) sum = combine(p.order, sum, p.partials[i]);
  return sum;
}

void add_bad(int64_t bad, int64_t* bad_counts, int32_t tensor) {
  if (bad > 0) std::atomic_ref<int64_t>(bad_counts[tensor]).fetch_add(bad, std::memory_order_relaxed);
}

}  // namespace

int32_t norm_chunk_elems_cpu() { return kChunkElems; }

Status grad_norm_partials_cpu(const GradNormParams& p, const Parallel& parallel) {
  const float factor = p.scale ? inverse_power_of_two(*p.scale) : 1.0f;
  return for_chunks(p.tensors, p.chunks, p.chunk_count, parallel, [&](int64_t chunk, const auto* x, int64_t count) {
    const bool is_known = p.known && is_finite(p.known[chunk]);
    p.partials[chunk] = is_known ? p.known[chunk] : partial_sum(p.order, x, count, factor);
  });
}

Status grad_norm_finish_cpu(const GradNormParams& p) {
  const double sum = sum_of_partials(p);
  *p.power_sum = sum;
  const double norm = norm_of(sum, p.order);
  if (p.norm_dtype == Dtype::float64)
    *static_cast<double*>(p.norm) = norm;
  else
    *static_cast<float*>(p.norm) = static_cast<float>(norm);
  return {};
}

Status grad_norm_cpu(const GradNormParams& p, const Parallel& parallel) {
  WARPSMITH_RETURN_IF_FAILED(grad_norm_partials_cpu(p, parallel));
  return grad_norm_finish_cpu(p);
}

Status clip_grads_cpu(const ClipParams& p, const Parallel& parallel) {
  const double factor = p.norm_dtype == Dtype::float64
                            ? clip_factor(*static_cast<const double*>(p.norm), p.max_norm)
                            : static_cast<double>(clip_factor(*static_cast<const float*>(p.norm), p.max_norm));
  if (factor == 1.0) return {};
  return for_chunks(p.tensors, p.chunks, p.chunk_count, parallel, [&](int64_t, auto* x, int64_t count) {
    using T = std::remove_pointer_t<decltype(x)>;
    scale(x, count, static_cast<Arithmetic<T>>(factor));
  });
}

Status grad_check_cpu(const GradCheckParams& p, const Parallel& parallel) {
  WARPSMITH_RETURN_IF_FAILED(grad_norm_partials_cpu(p.norm, parallel));
  const double sum = sum_of_partials(p.norm);
  *p.norm.power_sum = sum;
  const auto decide = [&]<class T>(T* norm) {
    const CheckedNorm<T> checked = check_norm<T>(sum, p.norm.order, *p.scale, p.max_norm);
    *norm = checked.norm;
    *p.grad_scale = checked.grad_scale;
    return checked.finite;
  };
  const bool finite = p.norm.norm_dtype == Dtype::float64 ? decide(static_cast<double*>(p.norm.norm))
                                                          : decide(static_cast<float*>(p.norm.norm));
  *p.found_inf = finite ? 0.0f : 1.0f;
  if (finite) return {};
  std::fill_n(p.bad_counts, p.tensor_count, 0);
  return for_chunks(
      p.norm.tensors, p.norm.chunks, p.norm.chunk_count, parallel, [&](int64_t chunk, auto* x, int64_t count) {
        using T = std::remove_pointer_t<decltype(x)>;
        add_bad(count_bad(x, count, inverse<Arithmetic<T>>(*p.scale)), p.bad_counts, p.norm.chunks[chunk].tensor);
      });
}

Status unscale_grads_cpu(const UnscaleParams& p, const Parallel& parallel) {
  return for_chunks(p.tensors, p.chunks, p.chunk_count, parallel, [&](int64_t chunk, auto* x, int64_t count) {
    using T = std::remove_pointer_t<decltype(x)>;
    scale(x, count, static_cast<Arithmetic<T>>(*p.inv_scale));
    const int64_t bad = count_bad(x, count, Arithmetic<T>(1));
    if (bad > 0) std::atomic_ref<float>(*p.found_inf).store(1.0f, std::memory_order_relaxed);
    add_bad(bad, p.bad_counts, p.chunks[chunk].tensor);
  });
}

}  // namespace warpsmith
