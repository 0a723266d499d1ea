#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace warpsmith::sim {

// Address space for tensors of more than 2^31 elements: pages exist once touched, untouched ones read as zero.
template <class T> class SparseMemory {
 public:
  explicit SparseMemory(size_t count) : bytes_(count * sizeof(T)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      std::perror("sparse memory");
      std::abort();
    }
    data_ = static_cast<T*>(p);
  }
  ~SparseMemory() { munmap(data_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  T* data() { return data_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace warpsmith::sim
