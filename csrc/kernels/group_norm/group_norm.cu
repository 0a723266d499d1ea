#include "kernels/group_norm/group_norm.h"

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/group_norm/backward.cuh"
#include "kernels/group_norm/forward.cuh"
#include "tiles/sum_partials.cuh"

// From params to launches.
namespace warpsmith {

using namespace group_norm;

namespace {

Status config_of(const GroupNormShape& p, int tensors, GroupNormConfig* out) {
  if (p.dtype == Dtype::float64) return no_cuda_kernel(p.dtype);
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *out = choose_group_norm({p.samples, p.pixels, p.channels, p.groups, size_bytes(p.dtype), device.multiprocessors,
                            device.code_capability >= kSm90, tensors, device.max_dynamic_shared_bytes});
  return {};
}

Ranges ranges_of(const GroupNormShape& p, const GroupNormConfig& c) {
  return {
      p.samples, p.pixels, ceil_div(p.pixels, int64_t{c.cluster}), c.vectors, p.channels, p.groups, p.group(), c.lanes,
      c.cluster, c.slots};
}

template <class Params> Status launch_clusters(void (*kernel)(Params), const Params& p, int64_t samples,
                                               const GroupNormConfig& c, void* stream) {
  constexpr int64_t kMost = 65535;  // of y and z
  const LaunchConfig config{
      .grid = dim3(static_cast<unsigned>(c.ranges * c.cluster), static_cast<unsigned>(std::min(samples, kMost)),
                   static_cast<unsigned>(ceil_div(samples, kMost))),
      .block = kThreads,
      .dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes),
      .cluster = static_cast<unsigned>(c.cluster)};
  return launch(kernel, config, stream, p);
}

// visit.template operator()<T, N>(): vectors of 16 bytes, or single elements.
template <class Visit> Status visit_vectors(Dtype dtype, int vector_elems, Visit&& visit) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    constexpr int N = 16 / sizeof(T);
    return vector_elems == N ? visit.template operator()<T, N>() : visit.template operator()<T, 1>();
  });
}

}  // namespace

Status group_norm_slices_cuda(const GroupNormBackwardParams& p, int64_t* slices) {
  GroupNormConfig c;
  WARPSMITH_RETURN_IF_FAILED(config_of(p, 2, &c));
  *slices = p.samples * c.cluster;
  return {};
}

Status group_norm_forward_cuda(const GroupNormForwardParams& p, void* stream) {
  GroupNormConfig c;
  WARPSMITH_RETURN_IF_FAILED(config_of(p, 1, &c));
  const ForwardParams f{.x = p.x,
                        .weight = p.weight,
                        .bias = p.bias,
                        .y = p.y,
                        .mean = static_cast<float*>(p.mean),
                        .rstd = static_cast<float*>(p.rstd),
                        .x_stride = p.x_stride / c.vector_elems,
                        .ranges = ranges_of(p, c),
                        .eps = p.eps,
                        .weight_dtype = p.weight_dtype,
                        .silu = p.silu};
  return visit_vectors(p.dtype, c.vector_elems,
                       [&]<class T, int N>() { return launch_clusters(forward<T, N>, f, p.samples, c, stream); });
}

Status group_norm_backward_cuda(const GroupNormBackwardParams& p, void* stream) {
  GroupNormConfig c;
  WARPSMITH_RETURN_IF_FAILED(config_of(p, 2, &c));
  double* const partials = p.dweight || p.dbias ? static_cast<double*>(p.partials) : nullptr;
  const int64_t slices = p.samples * c.cluster;
  const BackwardParams b{.dy = p.dy,
                         .x = p.x,
                         .weight = p.weight,
                         .bias = p.bias,
                         .dx = p.dx,
                         .mean = static_cast<const float*>(p.mean),
                         .rstd = static_cast<const float*>(p.rstd),
                         .partials = partials,
                         .dy_stride = p.dy_stride / c.vector_elems,
                         .x_stride = p.x_stride / c.vector_elems,
                         .ranges = ranges_of(p, c),
                         .slices = slices,
                         .weight_dtype = p.weight_dtype,
                         .silu = p.silu};
  WARPSMITH_RETURN_IF_FAILED(visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() {
    return launch_clusters(backward<T, N>, b, p.samples, c, stream);
  }));
  if (!partials) return {};
  return visit_cuda_dtype(p.weight_dtype, [&]<class W>() {
    return tiles::launch_sum_partials<W, double>(p.dweight ? partials : partials + slices * p.channels,
                                                 p.dweight ? p.dweight : p.dbias, slices, p.channels, stream,
                                                 p.dweight ? p.dbias : nullptr);
  });
}

}  // namespace warpsmith
