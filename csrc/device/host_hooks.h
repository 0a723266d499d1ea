#pragma once
#include <cstddef>
#include <cstdint>

// What device code needs from the machine when it runs on the host: declared here, defined by csrc/sim. Only the bodies
// of csrc/device call these; kernels see CUDA's own names (device/host_builtins.h) and the vocabulary.
//
// A kernel that needs a CUDA built-in or a primitive that is not there does not compile on the host: add the built-in
// to device/host_builtins.h, or the primitive to a header of csrc/device with a device body, a host body and a hook
// here.

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#ifdef __OPTIMIZE__
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline  // coverage builds: one copy of each function, so that its branches are counted once
#endif

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace warpsmith {
struct float16;
struct bfloat16;
struct float8_e4m3;
struct float8_e5m2;
}  // namespace warpsmith

namespace warpsmith::sim {

// Source line of the primitive's caller, for reports. Used as a defaulted parameter through WARPSMITH_SITE.
struct Site {
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

struct BlockView {
  uint3 index;
  dim3 threads, grid;
  unsigned cluster_rank, cluster_size;
  unsigned char* dynamic_shared;
};

struct ThreadView {
  uint3 index;
  BlockView* block_view;
  int linear_index;
};

// The CUDA thread that runs now. One OS thread runs the whole machine, so this is an ordinary global.
extern ThreadView* current_thread;

[[noreturn]] void fail(const char* message, Site site);

// Shared memory.
void* shared_array(const void* key, size_t bytes, size_t alignment, Site site);
uint32_t shared_address(const void* pointer, Site site);

// Memory access through the vocabulary: alignment check, byte counters, a point where the scheduler may switch threads.
void on_load(const void* pointer, int bytes, Site site);
void on_store(void* pointer, int bytes, Site site);
void on_atomic(void* pointer, int bytes, Site site);
void memory_fence(Site site);

// Barriers of a block.
void block_barrier(Site site);
int block_barrier_or(int value, Site site);
void named_barrier(int id, int threads, bool wait, Site site);

// Warp operations: every lane of `mask` must call, at the same line; the last one to arrive computes for all.
void warp_barrier(unsigned mask, Site site);
void warp_shuffle(unsigned mask, void* value, int bytes, int source_lane, Site site);  // source_lane < 0: own value
unsigned warp_ballot(unsigned mask, bool predicate, Site site);
unsigned warp_reduce(unsigned mask, unsigned value, int operation, Site site);  // 0 add, 1 max, 2 or

// Asynchronous copies of a thread (cp.async).
void copy_async(void* shared, const void* global, int bytes, int valid_bytes, Site site);
void copy_async_commit();
void copy_async_wait(int groups_in_flight, Site site);

// Programmatic dependent launch.
void wait_for_previous_kernel();
void launch_dependents();

// What the device computes within a bound: `exact` itself, or by Options::approximation a value as far off as
// `relative` and `absolute` allow, the rounding to float included. The same for the same input, so that equal inputs of
// two kernels give equal bits. 0, infinities and NaN stay.
float approximate(double exact, float input, double relative, double absolute = 0);

// Work that is counted.
void count_flops(int64_t flops);

}  // namespace warpsmith::sim

#define WARPSMITH_SITE , ::warpsmith::sim::Site site = ::warpsmith::sim::Site::here()
#define WARPSMITH_ONLY_SITE ::warpsmith::sim::Site site = ::warpsmith::sim::Site::here()
#define WARPSMITH_PASS_SITE , site
#define WARPSMITH_PASS_ONLY_SITE site

#define WARPSMITH_SHARED(T, name, count) \
  static const char name##_key = 0;      \
  T(&name)                               \
  [count] = *static_cast<T(*)[count]>(   \
      ::warpsmith::sim::shared_array(&name##_key, sizeof(T[count]), alignof(T), ::warpsmith::sim::Site::here()))
#define WARPSMITH_DYNAMIC_SHARED(name) \
  unsigned char* name = ::warpsmith::sim::current_thread->block_view->dynamic_shared

#include "device/host_builtins.h"
