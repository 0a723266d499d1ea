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
  *out = choose_group_norm(
      {p.samples, p.pixels, p.channels, p.groups, size_bytes(p.dtype), device.multiprocessors, tensors});
  return {};
}

Ranges ranges_of(const GroupNormShape& p, const GroupNormConfig& c, void* sums) {
  const int groups = static_cast<int>(p.groups / c.ranges);
  return {.pixels = p.pixels,
          .block_pixels = ceil_div(p.pixels, int64_t{c.set}),
          .channels = p.channels,
          .groups = p.groups,
          .vectors = c.vectors,
          .group = p.group(),
          .sums = static_cast<Sums*>(sums),
          .count = static_cast<unsigned>(c.ranges),
          .set = static_cast<unsigned>(c.set),
          .tiles = static_cast<unsigned>(c.tiles),
          .lanes = c.lanes,
          .rows_together = c.rows_together(),
          .range_groups = groups,
          .parts = kThreads / groups};
}

// after: the kernel waits for the one before it by itself.
template <class Params> Status launch_pass(void (*kernel)(Params), const GroupNormShape& shape,
                                           const GroupNormConfig& c, bool after, const Params& p, void* stream,
                                           size_t ring_bytes) {
  LaunchConfig config{
      .grid = static_cast<unsigned>(c.blocks(shape.samples)), .block = kThreads, .dynamic_shared_bytes = ring_bytes};
  if (after) WARPSMITH_RETURN_IF_FAILED(allow_overlap(&config));
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

Status group_norm_plan_cuda(const GroupNormShape& p, bool backward, GroupNormPlan* plan) {
  GroupNormConfig c;
  WARPSMITH_RETURN_IF_FAILED(config_of(p, backward ? 2 : 1, &c));
  plan->slices = p.samples * c.set;
  plan->sums = 2 * plan->slices * c.tiles * p.groups;
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
                        .ranges = ranges_of(p, c, p.sums),
                        .eps = p.eps,
                        .weight_dtype = p.weight_dtype};
  return visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() {
    WARPSMITH_RETURN_IF_FAILED(launch_pass(statistics<T, N>, p, c, false, f, stream, kRingBytes<T, N>));
    const auto kernel = p.silu ? &normalize<T, N, true> : &normalize<T, N, false>;
    return launch_pass(kernel, p, c, true, f, stream, kRingBytes<T, N>);
  });
}

Status group_norm_backward_cuda(const GroupNormBackwardParams& p, void* stream) {
  GroupNormConfig c;
  WARPSMITH_RETURN_IF_FAILED(config_of(p, 2, &c));
  double* const partials = p.dweight || p.dbias ? static_cast<double*>(p.partials) : nullptr;
  const int64_t slices = p.samples * c.set;
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
                         .ranges = ranges_of(p, c, p.sums),
                         .slices = slices,
                         .weight_dtype = p.weight_dtype};
  WARPSMITH_RETURN_IF_FAILED(visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() -> Status {
    const auto of_sums = p.silu ? &sums<T, N, true> : &sums<T, N, false>;
    WARPSMITH_RETURN_IF_FAILED(launch_pass(of_sums, p, c, false, b, stream, kRingBytes<T, N>));
    if (!p.dx) return {};
    const auto of_dx = p.silu ? &gradients<T, N, true> : &gradients<T, N, false>;
    return launch_pass(of_dx, p, c, true, b, stream, kRingBytes<T, N>);
  }));
  if (!partials) return {};
  return visit_cuda_dtype(p.weight_dtype, [&]<class W>() {
    return tiles::launch_sum_partials<W, double>(p.dweight ? partials : partials + slices * p.channels,
                                                 p.dweight ? p.dweight : p.dbias, slices, p.channels, stream,
                                                 p.dweight ? p.dbias : nullptr);
  });
}

}  // namespace warpsmith
