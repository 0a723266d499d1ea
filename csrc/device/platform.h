#pragma once

// Where device code meets its machine. nvcc builds take CUDA's keywords and built-ins from the toolkit; the host
// execution layer (WARPSMITH_SIM) supplies its own through device/host_hooks.h, and needs no CUDA headers. Shared
// memory is declared only through these macros, because on the host it must belong to the running block. WARPSMITH_SITE
// adds the caller's source line to a primitive's parameters on the host, and nothing on the device.
#ifdef WARPSMITH_SIM
#include "device/host_hooks.h"
#else
#include <cuda_runtime.h>

#define WARPSMITH_SHARED(T, name, count) __shared__ T name[count]
#define WARPSMITH_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define WARPSMITH_SITE
#define WARPSMITH_ONLY_SITE
#define WARPSMITH_PASS_SITE
#define WARPSMITH_PASS_ONLY_SITE
#endif
