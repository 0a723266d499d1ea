#pragma once

// Compiles a free function once per instruction set and picks at load time. It reaches neither lambdas nor templates
// that are not inlined: clone free inner loops. Off under sanitizers, which miss the resolver, and where the loader has
// no ifunc.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define WARPSMITH_CLONES
#define WARPSMITH_VECTORIZE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WARPSMITH_VECTORIZE
#endif

// Before a loop whose iterations do not depend on each other, though it reads and writes the same array.
#if defined(__clang__)
#define WARPSMITH_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define WARPSMITH_IVDEP _Pragma("GCC ivdep")
#endif
