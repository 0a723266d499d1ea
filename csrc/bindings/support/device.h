#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "bindings/support/tensor.h"
#include "common/parallel.h"

#ifdef WARPSMITH_CUDA
// Absent in CPU builds of torch; reached only with a CUDA tensor in hand.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace warpsmith {

#ifdef WARPSMITH_CUDA
inline void* current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return stream;
}
#endif

inline const Parallel& torch_threads() {
  static constexpr Parallel pool{[](int64_t count, int64_t grain, Parallel::Body body, void* context) {
    TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, grain, body, context));
  }};
  return pool;
}

// Runs the kernel of the tensor's device: `cuda(stream)` with that device current, or `cpu(threads)`.
template <class Cuda, class Cpu> void run_on(const char* op, const Tensor& t, Cuda&& cuda, Cpu&& cpu) {
#ifdef WARPSMITH_SIM
  (void)t, (void)cpu;
  raise_if_failed(op, cuda(static_cast<void*>(nullptr)));
  return;
#endif
#ifdef WARPSMITH_CUDA
  if (t.is_cuda()) {
    const torch::stable::accelerator::DeviceGuard guard(t.get_device_index());
    raise_if_failed(op, cuda(current_stream(t)));
    return;
  }
#else
  (void)t, (void)cuda;
#endif
  raise_if_failed(op, cpu(torch_threads()));
}

// Runs a kernel that needs nothing but its arguments. Builds without CUDA do not refer to that of the GPU.
template <auto cuda, auto cpu, class... Arguments>
void run_on(const char* op, const Tensor& t, const Arguments&... arguments) {
  run_on(
      op, t, [&]([[maybe_unused]] void* stream) { return cuda(arguments..., stream); },
      [&](const Parallel& threads) { return cpu(arguments..., threads); });
}

// Runs a kernel that adds up partial sums: `allocate` is told first how many rows of them it wants. The kernel is given
// `before` and `p`.
template <class Params, Status (*rows_cuda)(const Params&, int64_t*), auto cuda, auto cpu, class Allocate,
          class... Before>
void run_with_partials(const char* op, const Tensor& t, const Params& p, int64_t rows_cpu, Allocate&& allocate,
                       const Before&... before) {
  run_on(
      op, t,
      [&]([[maybe_unused]] void* stream) {
        int64_t rows = 0;
        WARPSMITH_RETURN_IF_FAILED(rows_cuda(p, &rows));
        allocate(rows);
        return cuda(before..., p, stream);
      },
      [&](const Parallel& threads) {
        allocate(rows_cpu);
        return cpu(before..., p, threads);
      });
}

#ifdef WARPSMITH_CUDA
// Makes the device of a CUDA tensor current.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) {
    if (t.is_cuda()) guard_.emplace(t.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};
#else
struct OnDeviceOf {
  explicit OnDeviceOf(const Tensor&) {}
};
#endif

}  // namespace warpsmith
