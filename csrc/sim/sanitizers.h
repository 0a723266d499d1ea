#pragma once
#include <cstddef>

// What the sanitizers are told about fibers, shared memory and ordering. csrc/sim is compiled without thread sanitizer
// instrumentation, so that its own bookkeeping is invisible; WARPSMITH_SIM_TSAN says that kernels are instrumented.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifdef WARPSMITH_SIM_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void __tsan_read_range(void*, unsigned long);
void __tsan_write_range(void*, unsigned long);
}
#endif

namespace warpsmith::sim {

#ifdef WARPSMITH_SIM_TSAN
constexpr bool kThreadSanitizer = true;
// An ordering object: what happened before release() happens before what follows a later acquire() of the same object.
inline void order_release(void* object) { __tsan_release(object); }
inline void order_acquire(void* object) { __tsan_acquire(object); }
inline void note_read(const void* p, size_t bytes) { __tsan_read_range(const_cast<void*>(p), bytes); }
inline void note_write(void* p, size_t bytes) { __tsan_write_range(p, bytes); }

// Intercepted library calls (memcpy, malloc) inside the scope are not accesses of the kernel. No fiber switch inside.
struct Untracked {
  static inline int depth = 0;
  Untracked() { begin(); }
  ~Untracked() { end(); }
  static void begin() {
    ++depth;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  static void end() {
    --depth;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  // For a thread whose frames are abandoned.
  static void end_all() {
    while (depth > 0) end();
  }
};
#else
constexpr bool kThreadSanitizer = false;
inline void order_release(void*) {}
inline void order_acquire(void*) {}
inline void note_read(const void*, size_t) {}
inline void note_write(void*, size_t) {}
struct Untracked {
  Untracked() {}
  ~Untracked() {}
  static void end_all() {}
};
#endif

// For loops over the machine's own arrays, whose indices no kernel chooses. Checked, they were most of the time of
// kernels with wgmma: a test of attention took 0.75 s, now 0.36 (without sanitizers 0.19).
#if defined(__SANITIZE_ADDRESS__)
#define WARPSMITH_SIM_UNCHECKED __attribute__((no_sanitize("address"), no_sanitize("undefined"), optimize("O2")))
#else
#define WARPSMITH_SIM_UNCHECKED
#endif

inline void forbid_memory([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(p, bytes);
#endif
}
inline void allow_memory([[maybe_unused]] void* p, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(p, bytes);
#endif
}

}  // namespace warpsmith::sim
