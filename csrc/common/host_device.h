#pragma once

// Marks arithmetic that a kernel and its CPU implementation share.
#ifdef __CUDACC__
#define WARPSMITH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WARPSMITH_HOST_DEVICE inline __attribute__((always_inline))
#endif
