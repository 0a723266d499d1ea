#pragma once
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace warpsmith {

// Memory that is cleared and mapped in pages of 4 KiB costs more than a kernel's pass over it; below these many bytes a
// huge page has little to save. The same limit as NumPy's.
constexpr int64_t kHugePagesFromBytes = int64_t{4} << 20;

// Asks the system to back `bytes` of new host memory, which all will be written, with huge pages. It may refuse: only
// the time changes. What the system backs is not more than these bytes.
inline void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(memory), end = first + static_cast<uintptr_t>(bytes);
  const uintptr_t aligned = (first + page - 1) / page * page;
  if (aligned < end) (void)madvise(reinterpret_cast<void*>(aligned), (end - aligned) / page * page, MADV_HUGEPAGE);
#endif
}

}  // namespace warpsmith
