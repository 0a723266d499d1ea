#include "kernels/softmax/softmax.cuh"

#include "common/visit_dtype.h"
#include "device/launch.h"

// From params to launches.
namespace warpsmith {
namespace {

template <class I, class O, bool kBackward>
void (*kernel_of(const SoftmaxConfig& c))(SoftmaxParams, softmax::Schedule) {
  if (c.slots == 0) return softmax::looped<I, O, kBackward>;
  return c.block_a_row() ? softmax::resident<I, O, kBackward, true> : softmax::resident<I, O, kBackward, false>;
}

// visit.template operator()<I, O>(): equal types, or one of them float.
template <class Visit> Status visit_dtypes(const SoftmaxParams& p, Visit&& visit) {
  const Dtype narrow = p.dtype == Dtype::float32 ? p.result_dtype : p.dtype;
  return visit_cuda_dtype(narrow, [&]<class T>() {
    if (p.dtype == p.result_dtype) return visit.template operator()<T, T>();
    return p.dtype == narrow ? visit.template operator()<T, float>() : visit.template operator()<float, T>();
  });
}

}  // namespace

Status softmax_cuda(const SoftmaxParams& p, void* stream) {
  constexpr int64_t kMostColumns = (int64_t{1} << 31) - 64;
  if (p.columns > kMostColumns)
    return Status::unsupported("columns: expected at most " + std::to_string(kMostColumns) + ", got " +
                               std::to_string(p.columns));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const bool aligned = rows_on_16_bytes(p.x, p.x_stride, p.rows, p.dtype);
  const SoftmaxConfig c = choose_softmax({p.rows, p.columns, size_bytes(p.dtype), aligned, p.dy ? 2 : 1,
                                          device.code_capability, device.max_dynamic_shared_bytes});
  const LaunchConfig config{.grid = static_cast<unsigned>(c.blocks),
                            .block = static_cast<unsigned>(c.threads),
                            .dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes),
                            .cluster = static_cast<unsigned>(c.cluster),
                            .bulk_copies = c.bulk};
  const softmax::Schedule schedule{c.lanes, static_cast<int>(c.part), c.slots, c.bulk};
  return visit_dtypes(p, [&]<class I, class O>() -> Status {
    // A forward's result is as wide as x or wider, a backward's as y or narrower.
    if constexpr (sizeof(O) >= sizeof(I))
      if (!p.dy) return launch(kernel_of<I, O, false>(c), config, stream, p, schedule);
    if constexpr (sizeof(O) <= sizeof(I))
      if (p.dy) return launch(kernel_of<I, O, true>(c), config, stream, p, schedule);
    return no_cuda_kernel(p.result_dtype);
  });
}

}  // namespace warpsmith
