#pragma once
#include "kernels/norm/backward.cuh"
#include "kernels/norm/backward_config.h"
#include "kernels/norm/batches.cuh"
#include "kernels/norm/launch.h"

namespace warpsmith::norm {

using RingKernel = void (*)(NormBackwardParams, int, int);
using BatchesKernel = void (*)(NormBackwardParams, int);

template <class Op, class T, class R, class C> constexpr RingKernel ring_kernel() {
  if constexpr (C::instance.kernel == NormKernel::ring)
    return backward_ring<Op, T, R, C>;
  else
    return nullptr;
}

template <class Op, class T, class C> constexpr BatchesKernel batches_kernel() {
  if constexpr (C::instance.kernel == NormKernel::batches)
    return backward_batches<Op, T, C>;
  else
    return nullptr;
}

template <class Op, class T, class R, size_t... kPlaces>
Status launch_backward_at(const NormConfig& c, const NormBackwardParams& p, void* stream,
                          std::index_sequence<kPlaces...>) {
  using List = Instances<NormBackwardInstances, Op, T, R>;
  static constexpr RingKernel rings[] = {ring_kernel<Op, T, R, typename List::template Type<kPlaces>>()...};
  static constexpr BatchesKernel batches[] = {batches_kernel<Op, T, typename List::template Type<kPlaces>>()...};
  if (c.kernel == NormKernel::ring) return launch(rings[c.instance], grid_of(c), stream, p, c.lanes, c.stages);
  return launch(batches[c.instance], grid_of(c), stream, p, c.stages);
}

template <class T> Status launch_backward(const NormConfig& c, const NormBackwardParams& p, void* stream) {
  return visit_op<T>(p.op, p.residual_dtype, [&]<class Op, class R>() {
    using Places = typename Instances<NormBackwardInstances, Op, T, R>::Places;
    return launch_backward_at<Op, T, R>(c, p, stream, Places());
  });
}

}  // namespace warpsmith::norm
