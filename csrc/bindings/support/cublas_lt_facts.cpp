#include <tuple>

#include "bindings/support/epilogue.h"
#include "bindings/support/errors.h"
#include "bindings/support/library.h"

// What `python -m warpsmith info` and warpsmith.plan ask of cuBLASLt.
#ifdef WARPSMITH_CUDA
namespace warpsmith {
namespace {

// Its version (130100 for 13.1.0), or a RuntimeError that says why it is not used.
int64_t cublas_lt_version() {
#ifdef WARPSMITH_CUBLAS_LT
  raise_if_failed("cublas_lt", cublas_lt::available());
  return cublas_lt::version();
#else
  throw std::runtime_error("cublas_lt: this build had no cublasLt.h");
#endif
}

// The library's choice for x [rows, in_features] @ weight^T [in_features, out_features] with GELU's epilogue, on the
// current device in bfloat16: algorithm, tile, stages, split-K and bytes of workspace. Algorithm -1: it has none.
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> cublas_lt_choice(int64_t device, int64_t rows,
                                                                         int64_t in_features, int64_t out_features) {
#ifdef WARPSMITH_CUBLAS_LT
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  void* const handle = epilogue_detail::blas_handle();
  cublas_lt::Product p{{nullptr, in_features, false},
                       {nullptr, in_features, true},
                       nullptr,
                       nullptr,
                       nullptr,
                       rows,
                       out_features,
                       in_features,
                       cublas_lt::Epilogue::gelu_bias,
                       Dtype::bfloat16,
                       static_cast<int>(device)};
  cublas_lt::Choice c;
  if (handle) raise_if_failed("cublas_lt", cublas_lt::choose(handle, p, &c));
  if (c.found) return {c.algorithm, c.tile, c.stages, c.split_k, c.workspace_bytes};
#else
  (void)device, (void)rows, (void)in_features, (void)out_features;
#endif
  return {-1, 0, 0, 0, 0};
}

WARPSMITH_HOST_OPS(m) {
  m.add("_cublas_lt_version() -> int", TORCH_BOX(&cublas_lt_version));
  m.add(
      "_cublas_lt_choice(int device, int rows, int in_features, int out_features) -> (int algorithm, int tile, int "
      "stages, int split_k, int workspace_bytes)",
      TORCH_BOX(&cublas_lt_choice));
}

}  // namespace
}  // namespace warpsmith
#endif
