#include "common/code_capability.h"

#include <torch/csrc/stable/accelerator.h>

#include "bindings/support/errors.h"
#include "bindings/support/library.h"

// `python -m warpsmith info` asks it which code runs on a device: what the choosers of kernels go by.
#ifdef WARPSMITH_CUDA
namespace warpsmith {
namespace {

int64_t code_capability_of(int64_t device) {
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  int capability = 0;
  raise_if_failed("code_capability", code_capability(&capability));
  return capability;
}

WARPSMITH_HOST_OPS(m) { m.add("_code_capability(int device) -> int", TORCH_BOX(&code_capability_of)); }

}  // namespace
}  // namespace warpsmith
#endif
