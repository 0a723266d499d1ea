#include "common/launch.h"
#include "kernels/norm/norm_launch.cuh"
#include "kernels/norm/rms_norm_config.h"
#include "kernels/norm/rms_norm_kernel.cuh"

namespace warpsmith {
namespace {

template <class T> constexpr int kVector = 16 / sizeof(T);

LaunchConfig grid_of(const RmsNormConfig& c) {
  LaunchConfig launch;
  launch.grid.x = static_cast<unsigned>(c.blocks);
  launch.block.x = static_cast<unsigned>(c.threads);
  launch.dynamic_shared_bytes = static_cast<size_t>(c.shared_bytes);
  return launch;
}

bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }
bool rows_on_16_bytes(const void* base, int64_t stride, int64_t rows, Dtype dtype) {
  return on_16_bytes(base) && (rows == 1 || stride * size_bytes(dtype) % 16 == 0);
}

Status problem_of(int64_t rows, int64_t columns, Dtype dtype, bool aligned, RmsNormProblem* out) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  *out = {rows, columns, size_bytes(dtype), aligned, device.multiprocessors, device.max_dynamic_shared_bytes};
  return {};
}

Status problem_of(const NormBackwardParams& p, RmsNormProblem* out) {
  const bool aligned = rows_on_16_bytes(p.s, p.s_stride, p.rows, p.dtype) &&
                       rows_on_16_bytes(p.dy, p.dy_stride, p.rows, p.dtype) && on_16_bytes(p.dx) &&
                       on_16_bytes(p.weight);
  return problem_of(p.rows, p.columns, p.dtype, aligned, out);
}

// Runs `visit.template operator()<T, W>()` for the storage types of activation and weight.
template <class Visit> Status dispatch(Dtype dtype, Dtype weight_dtype, Visit&& visit) {
  const bool fp32_weight = weight_dtype == Dtype::float32;
  switch (dtype) {
    case Dtype::float32: return visit.template operator()<float, float>();
    case Dtype::float16:
      return fp32_weight ? visit.template operator()<float16, float>() : visit.template operator()<float16, float16>();
    case Dtype::bfloat16:
      return fp32_weight ? visit.template operator()<bfloat16, float>()
                         : visit.template operator()<bfloat16, bfloat16>();
    case Dtype::float64: break;
  }
  return Status::unsupported(std::string("no CUDA kernel for ") + name(dtype));
}

Status no_kernel(const RmsNormConfig& c) {
  return Status::unsupported(std::string("no backward kernel ") + name(c.kernel) + " with " +
                             std::to_string(c.vectors) + " vectors a thread and " + std::to_string(c.lanes) +
                             " threads a row");
}

template <class T, class W> Status launch_backward(const NormBackwardParams& p, const RmsNormConfig& c, void* stream) {
  using namespace rms_norm;
  constexpr int N = kVector<T>;
  if (c.kernel == RmsNormKernel::looped) {
    void (*kernel)(NormBackwardParams, int) = nullptr;
    if (c.vector_elems == 1)
      kernel = c.block_a_row() ? backward_looped<T, W, 1, true> : backward_looped<T, W, 1, false>;
    else
      kernel = c.block_a_row() ? backward_looped<T, W, N, true> : backward_looped<T, W, N, false>;
    WARPSMITH_RETURN_IF_FAILED(launch(kernel, grid_of(c), stream, p, c.lanes));
  } else {
    void (*kernel)(NormBackwardParams, int, int) = nullptr;
    if (c.block_a_row()) {
      switch (c.vectors) {
        case 1: kernel = backward_ring<T, W, 1, true>; break;
        case 3: kernel = backward_ring<T, W, 3, true>; break;
        case 4: kernel = backward_ring<T, W, 4, true>; break;
      }
    } else {
      switch (c.vectors) {
        case 1: kernel = backward_ring<T, W, 1, false>; break;
        case 2: kernel = backward_ring<T, W, 2, false>; break;
        case 3: kernel = backward_ring<T, W, 3, false>; break;
        case 4: kernel = backward_ring<T, W, 4, false>; break;
      }
    }
    if (!kernel) return no_kernel(c);
    WARPSMITH_RETURN_IF_FAILED(launch(kernel, grid_of(c), stream, p, c.lanes, c.stages));
  }
  if (!p.dweight_partials) return {};

  LaunchConfig sum;
  sum.grid.x = static_cast<unsigned>(rms_norm_detail::ceil_div(p.columns, kSumColumns));
  sum.block.x = kSumColumns * static_cast<unsigned>(std::min<int64_t>(kMaxSumSlices, rms_norm_partial_rows(c)));
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  sum.programmatic_dependent = device.compute_capability >= 90;
  return launch(sum_partials<W>, sum, stream, p, rms_norm_partial_rows(c));
}

}  // namespace

Status rms_norm_forward_cuda(const NormForwardParams& p, void* stream) {
  return norm::forward_cuda<norm::RmsNorm>(p, stream);
}

Status rms_norm_partial_rows_cuda(const NormBackwardParams& p, int64_t* partial_rows) {
  RmsNormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  *partial_rows = rms_norm_partial_rows(choose_rms_norm_backward(problem));
  return {};
}

Status rms_norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  RmsNormProblem problem;
  WARPSMITH_RETURN_IF_FAILED(problem_of(p, &problem));
  return rms_norm_backward_cuda_with(choose_rms_norm_backward(problem), p, stream);
}

Status rms_norm_backward_cuda_with(const RmsNormConfig& c, const NormBackwardParams& p, void* stream) {
  return dispatch(p.dtype, p.weight_dtype, [&]<class T, class W>() { return launch_backward<T, W>(p, c, stream); });
}

}  // namespace warpsmith
