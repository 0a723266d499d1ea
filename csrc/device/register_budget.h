#pragma once
#include "device/platform.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#endif

// Moves registers between warpgroups (sm_90a only): a whole warpgroup, converged; a multiple of 8 from 24 to 256
// registers a thread; the kernel needs __launch_bounds__(threads, 1). increase waits until other warpgroups have
// decreased enough. PTX ISA 9.7.19.5 "setmaxnreg".
namespace warpsmith::device {

template <int Registers> __device__ __forceinline__ void increase_registers(WARPSMITH_ONLY_SITE) {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
#ifdef WARPSMITH_SIM
  sim::set_register_budget(Registers, true, site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

template <int Registers> __device__ __forceinline__ void decrease_registers(WARPSMITH_ONLY_SITE) {
  static_assert(Registers % 8 == 0 && Registers >= 24 && Registers <= 256);
#ifdef WARPSMITH_SIM
  sim::set_register_budget(Registers, false, site);
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

}  // namespace warpsmith::device
