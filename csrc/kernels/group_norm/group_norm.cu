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
                            tensors, device.max_dynamic_shared_bytes});
  return {};
}

// Two, or one where a set has one range.
int kept_of(const GroupNormShape& p, const GroupNormConfig& c) { return p.samples * c.ranges > c.sets ? 2 : 1; }

Ranges ranges_of(const GroupNormShape& p, const GroupNormConfig& c, const GroupNormMeeting& meeting) {
  return {.count = p.samples * c.ranges,
          .of_sample = c.ranges,
          .pixels = p.pixels,
          .block_pixels = ceil_div(p.pixels, int64_t{c.set}),
          .vectors = c.vectors,
          .channels = p.channels,
          .groups = p.groups,
          .group = p.group(),
          .lanes = c.lanes,
          .set = c.set,
          .sets = static_cast<int>(c.sets),
          .slots = c.slots,
          .sums = static_cast<double*>(meeting.sums),
          .flags = meeting.flags,
          .kept = kept_of(p, c)};
}

template <class Params>
Status launch_sets(void (*kernel)(Params), const Params& p, const GroupNormConfig& c, void* stream) {
  LaunchConfig config;
  config.grid.x = static_cast<unsigned>(c.sets * c.set);
  config.block.x = kThreads;
  config.dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes);
  if (c.set > 1) {  // the kernel before has cleared the flags
    config.together = static_cast<unsigned>(c.set);
    WARPSMITH_RETURN_IF_FAILED(allow_overlap(&config));
  }
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
  if (c.set == 1) return {};
  const int64_t groups = c.vectors > kLanes ? 1 : c.vectors * c.vector_elems / p.group();
  plan->sums = c.sets * kept_of(p, c) * c.set * 2 * groups;
  plan->flags = 1 + c.sets * c.set;
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
                        .ranges = ranges_of(p, c, p.meeting),
                        .eps = p.eps,
                        .weight_dtype = p.weight_dtype,
                        .silu = p.silu};
  return visit_vectors(p.dtype, c.vector_elems,
                       [&]<class T, int N>() { return launch_sets(forward<T, N>, f, c, stream); });
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
                         .ranges = ranges_of(p, c, p.meeting),
                         .slices = slices,
                         .weight_dtype = p.weight_dtype,
                         .silu = p.silu};
  WARPSMITH_RETURN_IF_FAILED(visit_vectors(
      p.dtype, c.vector_elems, [&]<class T, int N>() { return launch_sets(backward<T, N>, b, c, stream); }));
  if (!partials) return {};
  return visit_cuda_dtype(p.weight_dtype, [&]<class W>() {
    return tiles::launch_sum_partials<W, double>(p.dweight ? partials : partials + slices * p.channels,
                                                 p.dweight ? p.dweight : p.dbias, slices, p.channels, stream,
                                                 p.dweight ? p.dbias : nullptr);
  });
}

}  // namespace warpsmith
