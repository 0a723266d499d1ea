#pragma once
#include <cstddef>
#include <string>
#include <utility>

#include "common/code_capability.h"
#include "common/status.h"
#include "device/platform.h"

// The only way to launch a kernel. Without <<<>>> the host execution layer compiles launchers unchanged.
namespace warpsmith {

struct LaunchConfig {
  dim3 grid{1, 1, 1};
  dim3 block{1, 1, 1};
  size_t dynamic_shared_bytes = 0;
  unsigned cluster = 1;                 // blocks along x that form a cluster; must divide grid.x
  bool programmatic_dependent = false;  // may start before the stream's previous kernel ends; it must then call
                                        // device::wait_for_previous_kernel() before it reads what that one wrote
  bool bulk_copies = false;             // the kernel cannot work without bulk copies, mbarriers or st.async
  bool cooperative = false;             // every block resident at once, or the launch fails
};

// What a chooser may ask about the current device. The device's own compute capability is left out: what counts is the
// code that runs there.
struct DeviceProperties {
  int multiprocessors = 0;
  int code_capability = 0;           // 10 * major + minor (common/code_capability.h)
  int max_dynamic_shared_bytes = 0;  // a block's limit after opting in
};

// Clusters, programmatic launches, bulk copies, mbarrier waits and st.async are compiled for this code and newer.
constexpr int kSm90 = 90;

// Refuses a launch that the code on the device cannot run. A kernel launched all the same would skip every wait that
// was compiled out, and give wrong numbers without an error.
inline Status refuse_beyond_code(const LaunchConfig& config, int code_capability) {
  if (code_capability >= kSm90) return {};
  std::string asked;
  if (config.cluster > 1) asked = "clusters of " + std::to_string(config.cluster) + " blocks";
  if (config.programmatic_dependent) asked += (asked.empty() ? "" : " and ") + std::string("a programmatic launch");
  if (config.bulk_copies) asked += (asked.empty() ? "" : " and ") + std::string("bulk copies");
  if (asked.empty()) return {};
  return Status::unsupported("expected code of sm_90 or newer for " + asked + ", got code of sm_" +
                             std::to_string(code_capability));
}

// Shared memory per block, static and dynamic, without cudaFuncAttributeMaxDynamicSharedMemorySize.
constexpr size_t kSharedWithoutOptIn = 48 * 1024;
// A launch opts in above this much dynamic shared memory. The rest of the 48 KiB is for static shared memory, whose
// size only a query of the kernel would tell.
constexpr size_t kDynamicWithoutOptIn = 32 * 1024;

#ifdef WARPSMITH_SIM

Status device_properties(DeviceProperties& out);

namespace sim {
// cudaFuncSetAttribute with cudaFuncAttributeMaxDynamicSharedMemorySize.
Status set_max_dynamic_shared(const void* kernel, size_t bytes);
// Runs every thread of the grid before it returns; both are defined by csrc/sim.
Status run_grid(const LaunchConfig& config, const void* kernel, void (*run_thread)(const void* arguments),
                const void* arguments);
}  // namespace sim

template <class... P, class... A>
Status launch(void (*kernel)(P...), const LaunchConfig& config, void*, A&&... arguments) {
  int code = 0;
  WARPSMITH_RETURN_IF_FAILED(code_capability(&code));
  WARPSMITH_RETURN_IF_FAILED(refuse_beyond_code(config, code));
  // Not a tuple: without optimisation, std::apply would cost every thread of the grid a dozen calls.
  const auto call = [kernel, ... held = P(std::forward<A>(arguments))] { kernel(held...); };
  if (config.dynamic_shared_bytes > kDynamicWithoutOptIn)
    WARPSMITH_RETURN_IF_FAILED(
        sim::set_max_dynamic_shared(reinterpret_cast<const void*>(kernel), config.dynamic_shared_bytes));
  return sim::run_grid(
      config, reinterpret_cast<const void*>(kernel), [](const void* p) { (*static_cast<decltype(&call)>(p))(); },
      &call);
}

#else

inline Status cuda_status(cudaError_t error) {
  if (error == cudaSuccess) return {};
  const auto kind = error == cudaErrorMemoryAllocation ? Status::Kind::out_of_memory : Status::Kind::device;
  return Status::failure(kind, std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error));
}

// Properties of the current device. Two attribute queries, about 10 ns each: a cache per device is not worth it.
inline Status device_properties(DeviceProperties& out) {
  int device = 0;
  WARPSMITH_RETURN_IF_FAILED(cuda_status(cudaGetDevice(&device)));
  WARPSMITH_RETURN_IF_FAILED(
      cuda_status(cudaDeviceGetAttribute(&out.multiprocessors, cudaDevAttrMultiProcessorCount, device)));
  WARPSMITH_RETURN_IF_FAILED(code_capability(&out.code_capability));
  return cuda_status(
      cudaDeviceGetAttribute(&out.max_dynamic_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

template <class... P, class... A>
Status launch(void (*kernel)(P...), const LaunchConfig& config, void* stream, A&&... arguments) {
  if (config.cluster > 1 || config.programmatic_dependent || config.bulk_copies) {
    int code = 0;
    WARPSMITH_RETURN_IF_FAILED(code_capability(&code));
    WARPSMITH_RETURN_IF_FAILED(refuse_beyond_code(config, code));
  }
  if (config.dynamic_shared_bytes > kDynamicWithoutOptIn)
    WARPSMITH_RETURN_IF_FAILED(cuda_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                                static_cast<int>(config.dynamic_shared_bytes))));

  cudaLaunchAttribute attributes[3];
  unsigned count = 0;
  if (config.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {config.cluster, 1, 1};
  }
  if (config.programmatic_dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (config.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t launch{};
  launch.gridDim = config.grid;
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.dynamic_shared_bytes;
  launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = attributes;
  launch.numAttrs = count;
  const cudaError_t error = cudaLaunchKernelEx(&launch, kernel, P(std::forward<A>(arguments))...);
  if (error != cudaSuccess)
    (void)cudaGetLastError();  // a failed launch must not be reported again by a later, good one
  return cuda_status(error);
}

#endif

// Lets a launch begin while the previous kernel on the stream still runs, if the code that runs contains the wait that
// makes this safe. Otherwise the launch stays an ordinary one.
inline Status allow_overlap(LaunchConfig* config) {
  int code = 0;
  WARPSMITH_RETURN_IF_FAILED(code_capability(&code));
  config->programmatic_dependent = code >= kSm90;
  return {};
}

}  // namespace warpsmith
