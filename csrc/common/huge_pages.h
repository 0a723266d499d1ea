#pragma once
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace warpsmith {

// The least size for huge pages. The system clears and maps new memory page by page. With pages of 4 KiB that takes
// longer than a kernel's pass over the memory; below this size huge pages save little. NumPy has the same limit.
constexpr int64_t kHugePagesFromBytes = int64_t{4} << 20;

// Asks the system to back new host memory with huge pages. All `bytes` will be written, so huge pages take no more
// memory. The system may refuse; then only the time differs.
inline void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(memory), end = first + static_cast<uintptr_t>(bytes);
  const uintptr_t aligned = (first + page - 1) / page * page;
  if (aligned < end) (void)madvise(reinterpret_cast<void*>(aligned), (end - aligned) / page * page, MADV_HUGEPAGE);
#endif
}

}  // namespace warpsmith
