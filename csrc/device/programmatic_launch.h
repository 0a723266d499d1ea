#pragma once
#include "device/platform.h"

// Programmatic dependent launch (LaunchConfig::programmatic_dependent). PTX ISA 9.7.13 "griddepcontrol"; before sm_90
// both are nothing, and launches are never overlapped there.
namespace warpsmith::device {

// Every thread that reads or writes what the stream's previous kernel wrote or read calls this first. Returns when that
// kernel has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#ifdef WARPSMITH_SIM
  sim::wait_for_previous_kernel();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A hint: the stream's next kernel may start its blocks once every block has called this or exited. Gives no
// visibility.
__device__ __forceinline__ void launch_dependents() {
#ifdef WARPSMITH_SIM
  sim::launch_dependents();
#elif __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace warpsmith::device
