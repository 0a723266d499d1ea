#include <algorithm>
#include <atomic>

#include "common/code_capability.h"
#include "device/during_capture.h"
#include "device/launch.h"

namespace warpsmith {
namespace {

// Never launched. The driver picks its code by the same rules as that of every other kernel of the library.
__global__ void probe() {}

// PTX of sm_80 that the driver compiled for sm_90 has binaryVersion 90 and ptxVersion 80. Machine code of sm_80 on
// sm_89 has 80 for both. binaryVersion is never more than the device's capability.
Status ask_driver(int* capability) {
  const DuringCapture allowed;
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  if (error != cudaSuccess) (void)cudaGetLastError();  // reported here, and not again by a later launch
  WARPSMITH_RETURN_IF_FAILED(cuda_status(error));
  *capability = std::min(attributes.binaryVersion, attributes.ptxVersion);
  return {};
}

constexpr int kKnownDevices = 64;  // of others, every call asks the driver
std::atomic<int> known[kKnownDevices];

}  // namespace

Status code_capability(int* capability) {
  int device = 0;
  WARPSMITH_RETURN_IF_FAILED(cuda_status(cudaGetDevice(&device)));
  if (device < kKnownDevices && (*capability = known[device].load(std::memory_order_relaxed)) != 0) return {};
  WARPSMITH_RETURN_IF_FAILED(ask_driver(capability));
  // First calls at the same time store the same number.
  if (device < kKnownDevices) known[device].store(*capability, std::memory_order_relaxed);
  return {};
}

}  // namespace warpsmith
