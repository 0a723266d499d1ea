#pragma once
#include "kernels/norm/forward.cuh"
#include "kernels/norm/forward_block.cuh"
#include "kernels/norm/forward_config.h"
#include "kernels/norm/forward_resident.cuh"
#include "kernels/norm/forward_shared.cuh"
#include "kernels/norm/forward_warp.cuh"
#include "kernels/norm/launch.h"

namespace warpsmith::norm {

using ForwardKernel = void (*)(NormForwardParams, int);

template <class Op, class T, class R, class C, bool kCasts> constexpr ForwardKernel forward_kernel() {
  if constexpr (kCasts) {
    if constexpr (norm_casts(typed_problem<Op, T, R>(), C::instance)) return forward_registers<Op, T, R, C, true>;
    return nullptr;
  }
  if constexpr (C::instance.kernel == NormKernel::warp) return forward_warp<Op, T, C>;
  if constexpr (C::instance.kernel == NormKernel::block) return forward_block<Op, T, C>;
  if constexpr (C::instance.kernel == NormKernel::shared) return forward_shared<Op, T, C>;
  if constexpr (C::instance.kernel == NormKernel::resident) return forward_resident<Op, T, C>;
  if constexpr (C::instance.kernel == NormKernel::registers) return forward_registers<Op, T, R, C, false>;
}

template <class Op, class T, class R, bool kCasts, size_t... kPlaces>
ForwardKernel forward_kernel_at(int place, std::index_sequence<kPlaces...>) {
  using List = Instances<NormForwardInstances, Op, T, R>;
  static constexpr ForwardKernel kernels[] = {
      forward_kernel<Op, T, R, typename List::template Type<kPlaces>, kCasts>()...};
  return kernels[place];
}

template <class T> Status launch_forward(const NormConfig& c, const NormForwardParams& p, bool casts, void* stream) {
  return visit_op<T>(p.op, p.residual_dtype, [&]<class Op, class R>() {
    using Places = typename Instances<NormForwardInstances, Op, T, R>::Places;
    const ForwardKernel kernel = casts ? forward_kernel_at<Op, T, R, true>(c.instance, Places())
                                       : forward_kernel_at<Op, T, R, false>(c.instance, Places());
    return launch(kernel, grid_of(c), stream, p, c.lanes);
  });
}

}  // namespace warpsmith::norm
