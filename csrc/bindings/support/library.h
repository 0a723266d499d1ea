#pragma once
#include <torch/csrc/stable/library.h>

// Registers an op's schemas (once) and its implementations for the devices of this build. Used at namespace scope:
//
//   WARPSMITH_SCHEMAS(m) { m.def("axpby(Tensor x, Tensor y) -> Tensor"); }
//   WARPSMITH_IMPLEMENTATIONS(m) { m.impl("axpby", TORCH_BOX(&axpby)); }
#define WARPSMITH_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(warpsmith, m)

#define WARPSMITH_IMPLEMENTATIONS_NAMED_(function, m)                                                            \
  template <class Library> void function(Library& m);                                                            \
  STABLE_TORCH_LIBRARY_IMPL(warpsmith, CPU, warpsmith_cpu) { function(warpsmith_cpu); }                          \
  WARPSMITH_CUDA_ONLY_(STABLE_TORCH_LIBRARY_IMPL(warpsmith, CUDA, warpsmith_cuda) { function(warpsmith_cuda); }) \
  template <class Library> void function(Library& m)

#ifdef WARPSMITH_CUDA
#define WARPSMITH_CUDA_ONLY_(...) __VA_ARGS__
#else
#define WARPSMITH_CUDA_ONLY_(...)
#endif
#define WARPSMITH_IMPLEMENTATIONS(m) WARPSMITH_IMPLEMENTATIONS_NAMED_(warpsmith_register_implementations, m)
