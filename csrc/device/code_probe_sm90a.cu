#include <atomic>

#include "common/code_capability.h"
#include "device/during_capture.h"

namespace warpsmith {
namespace {

// Never launched. Where the driver finds no code for the device, it finds none of the other kernels of sm_90a either.
__global__ void probe_sm90a() {}

bool ask_driver() {
  const DuringCapture allowed;
  cudaFuncAttributes attributes{};
  const bool found = cudaFuncGetAttributes(&attributes, probe_sm90a) == cudaSuccess;
  if (!found) (void)cudaGetLastError();  // not to be reported again by a later, good launch
  return found;
}

constexpr int kKnownDevices = 64;  // of others, every call asks the driver
enum Answer { kUnknown, kRuns, kDoesNot };
std::atomic<int> known[kKnownDevices];

}  // namespace

bool runs_sm90a_code() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device >= kKnownDevices) return ask_driver();
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == kUnknown) known[device].store(answer = ask_driver() ? kRuns : kDoesNot, std::memory_order_relaxed);
  return answer == kRuns;
}

}  // namespace warpsmith
