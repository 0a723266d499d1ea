#pragma once
#include <string>

#include "common/launch.h"
#include "kernels/norm/norm_backward.cuh"
#include "kernels/norm/norm_backward_config.h"
#include "kernels/norm/norm_batches.cuh"
#include "kernels/norm/norm_forward.cuh"
#include "kernels/norm/norm_forward_block.cuh"
#include "kernels/norm/norm_forward_config.h"
#include "kernels/norm/norm_forward_resident.cuh"
#include "kernels/norm/norm_forward_shared.cuh"
#include "kernels/norm/norm_forward_warp.cuh"
#include "kernels/norm/norm_sum_partials.cuh"

// From the params of an op to its kernel: problem, configuration, storage types, launch.
namespace warpsmith::norm {

inline bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
inline bool rows_on_16_bytes(const void* base, int64_t stride, int64_t rows, Dtype dtype) {
  return on_16_bytes(base) && (!base || rows == 1 || stride * size_bytes(dtype) % 16 == 0);
}

template <class Op, class Params> Status problem_of(const Params& p, bool aligned, NormProblem* out) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  out->rows = p.rows, out->columns = p.columns;
  out->element_bytes = size_bytes(p.dtype);
  out->residual_bytes = Op::kResidual ? size_bytes(p.residual_dtype) : 0;
  out->layer = Op::kLayer;
  out->aligned = aligned;
  out->multiprocessors = device.multiprocessors;
  out->max_shared_bytes = device.max_dynamic_shared_bytes;
  out->clusters = device.compute_capability >= 90;
  return {};
}

template <class Op> Status problem_of(const NormForwardParams& p, NormProblem* out) {
  const bool aligned = rows_on_16_bytes(p.x, p.x_stride, p.rows, p.dtype) && on_16_bytes(p.y) &&
                       rows_on_16_bytes(p.residual, p.residual_stride, p.rows, p.residual_dtype) &&
                       on_16_bytes(p.residual_out) && on_16_bytes(p.weight) && on_16_bytes(p.bias);
  out->affine_as_x = p.weight && (!Op::kLayer || p.bias) && p.weight_dtype == p.dtype && p.weight_offset == 0;
  return problem_of<Op>(p, aligned, out);
}

template <class Op> Status problem_of(const NormBackwardParams& p, NormProblem* out) {
  const bool aligned = rows_on_16_bytes(p.dy, p.dy_stride, p.rows, p.dtype) &&
                       rows_on_16_bytes(p.s, p.s_stride, p.rows, p.residual_dtype) &&
                       rows_on_16_bytes(p.dresidual_out, p.dresidual_out_stride, p.rows, p.residual_dtype) &&
                       on_16_bytes(p.dx) && on_16_bytes(p.dresidual) && on_16_bytes(p.weight);
  return problem_of<Op>(p, aligned, out);
}

// Runs visit.operator()<T, R>() for the storage types of activation and residual.
template <class Op, class Visit> Status dispatch(Dtype dtype, Dtype residual_dtype, Visit&& visit) {
  const bool wide = Op::kResidual && residual_dtype == Dtype::float32;
  if (dtype == Dtype::float32) return visit.template operator()<float, float>();
  if constexpr (Op::kResidual) {
    if (dtype == Dtype::float16 && wide) return visit.template operator()<float16, float>();
    if (dtype == Dtype::bfloat16 && wide) return visit.template operator()<bfloat16, float>();
  }
  if (dtype == Dtype::float16) return visit.template operator()<float16, float16>();
  if (dtype == Dtype::bfloat16) return visit.template operator()<bfloat16, bfloat16>();
  return Status::unsupported(std::string("no CUDA kernel for ") + name(dtype));
}

inline Status no_kernel(const char* direction, const NormConfig& c) {
  return Status::unsupported(std::string("no ") + direction + " kernel " + name(c.kernel) + " of a " + name(c.scope) +
                             " with " + std::to_string(c.vectors) + " vectors a thread, " + std::to_string(c.rows) +
                             " rows and " + std::to_string(c.threads) + " threads");
}

inline LaunchConfig grid_of(const NormConfig& c) {
  LaunchConfig launch;
  launch.grid.x = static_cast<unsigned>(c.blocks);
  launch.block.x = static_cast<unsigned>(c.threads);
  launch.dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes);
  launch.cluster = static_cast<unsigned>(c.cluster);
  return launch;
}

constexpr int instance(Scope scope, int vectors, int rows) {
  return (static_cast<int>(scope) * 16 + vectors) * 16 + rows;
}

// Launch bounds are those that the sweep measured.
template <class Op, class T> auto shared_kernel(const NormConfig& c) {
  constexpr int kThreads = kNormSharedThreads;
  void (*kernel)(NormForwardParams, int) = nullptr;
  if constexpr (!Op::kResidual && sizeof(T) == 2) {
    if (c.vectors == 4) kernel = forward_shared<Op, T, 4, Op::kLayer, kThreads, 384, (Op::kLayer ? 3 : 4)>;
    if (c.vectors == 6) kernel = forward_shared<Op, T, 6, true, kThreads, kThreads, 4>;
    if (c.kernel == NormKernel::resident) kernel = forward_resident<Op, T, 6, kThreads, kNormResidentRows, 2>;
  }
  return kernel;
}

// With as many blocks a multiprocessor as 40 (two vectors), 48 or 64 registers a thread allow.
template <class Op, class T, int V, bool kFills, int... kThreads> auto block_kernel_of(int threads) {
  void (*kernel)(NormForwardParams, int) = nullptr;
  constexpr auto kBlocks = [](int of) { return (V == 2 ? 1536 : V == 3 ? 1280 : 1024) / of; };
  ((threads == kThreads ? kernel = forward_block < Op, T, V, V == 2 ? 2 : 1, kThreads, kFills,
    kBlocks(kThreads) > : nullptr),
   ...);
  return kernel;
}

template <class Op, class T> auto block_kernel(const NormConfig& c, int64_t columns) {
  void (*kernel)(NormForwardParams, int) = nullptr;
  if constexpr (Op::kLayer && !Op::kResidual && sizeof(T) == 2) {
    const bool fills = columns == int64_t{c.threads} * c.vectors * c.vector_elems;
    if (c.vectors == 2)
      kernel = fills ? block_kernel_of<Op, T, 2, true, 96, 128, 160, 192, 224, 256>(c.threads)
                     : block_kernel_of<Op, T, 2, false, 96, 128, 160, 192, 224, 256>(c.threads);
    if (c.vectors == 3) kernel = block_kernel_of<Op, T, 3, true, 96, 160>(c.threads);
    if (c.vectors == 4)
      kernel = fills ? block_kernel_of<Op, T, 4, true, 160, 192, 224, 288, 320, 352, 416, 448, 512>(c.threads)
                     : block_kernel_of<Op, T, 4, false, 192, 256, 320, 384, 512>(c.threads);
  }
  return kernel;
}

template <class Op, class T> auto warp_kernel(const NormConfig& c) {
  void (*kernel)(NormForwardParams, int) = nullptr;
  if constexpr (!Op::kResidual && sizeof(T) == 2) {
    constexpr bool kLayer = Op::kLayer;
    constexpr auto kRows = norm_rows_of_a_lane;
    switch (c.lanes * 16 + c.vectors) {
      case 8 * 16 + 1: kernel = forward_warp < Op, T, 8, 1, kRows(1), 64, kLayer ? 14 : 16 > ; break;
      case 16 * 16 + 1: kernel = forward_warp < Op, T, 16, 1, kRows(1), 64, kLayer ? 14 : 16 > ; break;
      case 32 * 16 + 1: kernel = forward_warp < Op, T, 32, 1, kRows(1), 64, kLayer ? 14 : 16 > ; break;
      case 32 * 16 + 2: kernel = forward_warp < Op, T, 32, 2, kRows(2), 64, kLayer ? 14 : 16 > ; break;
      case 32 * 16 + 3: kernel = forward_warp < Op, T, 32, 3, kRows(3), 64, kLayer ? 8 : 12 > ; break;
      case 32 * 16 + 4: kernel = forward_warp < Op, T, 32, 4, kRows(4), 64, kLayer ? 12 : 16 > ; break;
    }
  }
  return kernel;
}

template <class Op, class T, class R> auto forward_kernel(const NormConfig& c, int64_t columns) {
  if (c.kernel == NormKernel::shared || c.kernel == NormKernel::resident) return shared_kernel<Op, T>(c);
  if (c.kernel == NormKernel::warp) return warp_kernel<Op, T>(c);
  if (c.kernel == NormKernel::block) return block_kernel<Op, T>(c, columns);
  // Blocks that share the registers of a multiprocessor; where they get fewer, more would spill.
  constexpr bool kWide = sizeof(R) != sizeof(T);
  constexpr int kRows = norm_rows_of_three_vectors(Op::kLayer, Op::kResidual), kPreferred = kNormPreferredThreads;
  constexpr int kFew = kWide ? 1 : Op::kDropout ? 8 : 16, kMany = kWide ? 1 : 12, kThree = kRows == 1 ? kFew : kMany;
  constexpr int kSmall = kWide ? 1 : Op::kDropout || (Op::kLayer && Op::kResidual) ? 2 : 3;
  constexpr int kLarge = kWide || Op::kDropout ? 1 : 2;
  void (*kernel)(NormForwardParams, int) = nullptr;
  switch (instance(c.scope, c.vectors, c.rows)) {
    case instance(Scope::group, 1, 4): kernel = forward_registers<Op, T, R, 1, 4, Scope::group, 64, kFew>; break;
    case instance(Scope::group, 2, 1): kernel = forward_registers<Op, T, R, 2, 1, Scope::group, 64, kFew>; break;
    case instance(Scope::group, 3, kRows):
      kernel = forward_registers<Op, T, R, 3, kRows, Scope::group, 64, kThree>;
      break;
    case instance(Scope::group, 4, 1): kernel = forward_registers<Op, T, R, 4, 1, Scope::group, 64, kMany>; break;
    case instance(Scope::block, 2, 1):
      if constexpr (!Op::kLayer && !Op::kResidual) kernel = forward_registers<Op, T, R, 2, 1, Scope::block, 256, 6>;
      break;
    case instance(Scope::block, 3, 1):
      if constexpr (Op::kLayer && sizeof(T) == 2 && sizeof(R) == 2)
        kernel = forward_registers<Op, T, R, 3, 1, Scope::block, kPreferred, 3>;
      break;
    case instance(Scope::block, 4, 1):
      kernel = forward_registers<Op, T, R, 4, 1, Scope::block, kNormBlockThreads, kLarge>;
      if (c.threads <= kPreferred) kernel = forward_registers<Op, T, R, 4, 1, Scope::block, kPreferred, kSmall>;
      break;
    case instance(Scope::cluster, 4, 1):
      kernel = forward_registers<Op, T, R, 4, 1, Scope::cluster, kNormBlockThreads, 1>;
      break;
  }
  return kernel;
}

template <class Op, class T, class R> auto ring_kernel(const NormConfig& c) {
  constexpr bool kWide = sizeof(R) > sizeof(T);
  constexpr int kEach = kNormRingVectors, kMost = norm_ring_threads(Op::kLayer);
  void (*kernel)(NormBackwardParams, int, int) = nullptr;
  switch (instance(c.scope, c.vectors, c.rows)) {
    case instance(Scope::group, 1, 1):
      if constexpr (kWide) kernel = backward_ring<Op, T, R, 1, 1, Scope::group, 256, 1>;
      break;
    case instance(Scope::group, 1, 2):
      if constexpr (!kWide) kernel = backward_ring<Op, T, R, 1, 2, Scope::group, 256, 1>;
      break;
    case instance(Scope::group, 2, 1):
      if constexpr (kWide) kernel = backward_ring<Op, T, R, 2, 1, Scope::group, 256, 1>;
      break;
    case instance(Scope::group, 3, 1):
      if constexpr (kWide) kernel = backward_ring<Op, T, R, 3, 1, Scope::group, 256, 1>;
      break;
    case instance(Scope::group, 4, 1):
      if constexpr (kWide) kernel = backward_ring<Op, T, R, 4, 1, Scope::group, 256, 1>;
      break;
    case instance(Scope::block, kEach, 1):
      if constexpr (kWide || (!Op::kLayer && Op::kResidual))
        kernel = backward_ring<Op, T, R, kEach, 1, Scope::block, kMost, 1>;
      break;
    case instance(Scope::cluster, 2, 2): kernel = backward_ring<Op, T, R, 2, 2, Scope::cluster, 256, 1>; break;
  }
  return kernel;
}

template <class Op, class T> auto batches_kernel(const NormConfig& c) {
  constexpr bool kRms = !Op::kLayer && !Op::kResidual;
  constexpr bool kOne = norm_shares_weight(1, false, Op::kLayer, Op::kResidual),
                 kTwo = norm_shares_weight(2, false, Op::kLayer, Op::kResidual),
                 kFour = norm_shares_weight(4, false, Op::kLayer, Op::kResidual),
                 kCluster = norm_shares_weight(1, true, Op::kLayer, Op::kResidual);
  constexpr int kThreads = norm_batch_threads_of_two(Op::kResidual);
  constexpr Keep kFew = Keep::products, kMore = Keep::elements, kMost = Keep::nothing;
  void (*kernel)(NormBackwardParams, int) = nullptr;
  switch (instance(c.scope, c.vectors, c.rows)) {
    case instance(Scope::block, 1, 1):
      if constexpr (Op::kLayer) kernel = backward_batches<Op, T, 1, 1, kFew, kOne, 512, 1>;
      if constexpr (kRms) kernel = backward_batches<Op, T, 1, 1, kMore, kOne, 512, 2>;
      break;
    case instance(Scope::block, 1, 2):
      if constexpr (!Op::kLayer || !Op::kResidual) kernel = backward_batches<Op, T, 1, 2, kFew, kOne, 512, 1>;
      break;
    case instance(Scope::block, 2, 1):
      if constexpr (Op::kLayer || !Op::kResidual) kernel = backward_batches<Op, T, 2, 1, kMore, kTwo, kThreads, 1>;
      break;
    case instance(Scope::block, 4, 1):
      if constexpr (kRms) kernel = backward_batches<Op, T, 4, 1, kMost, kFour, 512, 1>;
      break;
    case instance(Scope::cluster, 1, 2):
      if constexpr (kRms) kernel = backward_batches<Op, T, 1, 2, kMore, kCluster, 768, 1, 4>;
      if constexpr (!kRms) kernel = backward_batches<Op, T, 1, 2, kFew, kCluster, 512, 1, 4>;
      break;
    case instance(Scope::cluster, 2, 1):
      if constexpr (Op::kLayer && !Op::kResidual) kernel = backward_batches<Op, T, 2, 1, kFew, kCluster, 512, 1, 4>;
      break;
  }
  return kernel;
}

template <class Op> Status forward_with(const NormConfig& c, const NormForwardParams& p, void* stream) {
  if (c.kernel == NormKernel::looped) {
    const auto kernel = c.vector_elems == 1 ? forward_looped<Op, 1> : forward_looped<Op, 4>;
    if (p.dtype == Dtype::float64) return Status::unsupported(std::string("no CUDA kernel for ") + name(p.dtype));
    return launch(kernel, grid_of(c), stream, p, c.lanes);
  }
  return dispatch<Op>(p.dtype, p.residual_dtype, [&]<class T, class R>() {
    const auto kernel = forward_kernel<Op, T, R>(c, p.columns);
    return kernel ? launch(kernel, grid_of(c), stream, p, c.lanes) : no_kernel("forward", c);
  });
}

template <class Op> Status forward_cuda(const NormForwardParams& p, void* stream) {
  NormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of<Op>(p, &problem));
  return forward_with<Op>(choose_norm_forward(problem), p, stream);
}

inline Status sum_partial_rows(const NormSumConfig& c, const NormBackwardParams& p, int64_t partial_rows,
                               void* stream) {
  SumPartialsParams sum{{}, {}, partial_rows, p.columns, p.weight_dtype};
  LaunchConfig grid;
  grid.grid.y = 0;
  if (p.dweight_partials) {
    sum.partials[grid.grid.y] = static_cast<const float*>(p.dweight_partials);
    sum.sums[grid.grid.y++] = p.dweight;
  }
  if (p.dbias_partials) {
    sum.partials[grid.grid.y] = static_cast<const float*>(p.dbias_partials);
    sum.sums[grid.grid.y++] = p.dbias;
  }
  if (grid.grid.y == 0) return {};
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  grid.grid.x = static_cast<unsigned>(norm_detail::ceil_div(p.columns, int64_t{c.tile_vectors} * c.vector_elems));
  grid.block.x = static_cast<unsigned>(c.threads);
  grid.programmatic_dependent = device.compute_capability >= 90;
  return launch(c.vector_elems == 4 ? sum_partials<4> : sum_partials<1>, grid, stream, sum, c.tile_vectors);
}

template <class Op> Status backward_with(const NormConfig& c, const NormBackwardParams& p, void* stream) {
  const auto first_stage = [&] {
    if (c.kernel == NormKernel::looped) {
      if (p.dtype == Dtype::float64) return Status::unsupported(std::string("no CUDA kernel for ") + name(p.dtype));
      return launch(c.vector_elems == 1 ? backward_looped<Op, 1> : backward_looped<Op, 4>, grid_of(c), stream, p,
                    c.lanes);
    }
    return dispatch<Op>(p.dtype, p.residual_dtype, [&]<class T, class R>() {
      if constexpr (sizeof(T) == sizeof(R)) {
        if (c.kernel == NormKernel::batches) {
          const auto kernel = batches_kernel<Op, T>(c);
          return kernel ? launch(kernel, grid_of(c), stream, p, c.stages) : no_kernel("backward", c);
        }
      }
      const auto kernel = ring_kernel<Op, T, R>(c);
      return kernel ? launch(kernel, grid_of(c), stream, p, c.lanes, c.stages) : no_kernel("backward", c);
    });
  };
  WARPSMITH_RETURN_IF_FAILED(first_stage());
  const int64_t partial_rows = norm_partial_rows(c);
  return sum_partial_rows(choose_norm_sum(p.columns), p, partial_rows, stream);
}

template <class Op> Status partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  NormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of<Op>(p, &problem));
  *partial_rows = norm_partial_rows(choose_norm_backward(problem));
  return {};
}

template <class Op> Status backward_cuda(const NormBackwardParams& p, void* stream) {
  NormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of<Op>(p, &problem));
  return backward_with<Op>(choose_norm_backward(problem), p, stream);
}

}  // namespace warpsmith::norm
