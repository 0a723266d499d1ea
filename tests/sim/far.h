#pragma once
#include <cstring>

#include "harness.h"
#include "sim/sparse_memory.h"

// The last rows of contiguous tensors of more than 2^31 elements, whose offsets need 64 bits. Memory exists only where
// it is touched, and only the blocks at the end of a grid run:
//
//   const int64_t first = first_far_row(columns);
//   Far<bfloat16> x(near.x, first, columns), y(near.y, first, columns);
//   params.x = x.data(), params.y = y.data(), params.rows = first + near.rows;
//   const FarMachine machine(near.rows);
//   y.poison(); expect_ok(launcher(params)); y.fetch(); check(near.y);
namespace warpsmith::test {

// The first of the last `rows` rows of a tensor, which lie just beyond element 2^31. `units`: the tensor's rows are a
// multiple of it, for kernels whose last rows do not belong to the last blocks otherwise.
constexpr int64_t first_far_row(int64_t columns, int64_t rows = 0, int64_t units = 1) {
  const int64_t all = (int64_t{1} << 31) / columns + 1 + rows;
  return (all + units - 1) / units * units - rows;
}

// A tensor whose last rows are those of `near`: copied there at first, copied back by fetch().
template <class T> class Far {
 public:
  Far(Buffer<T>& near, int64_t first_row, int64_t row_elements)
      : near_(near), first_(static_cast<size_t>(first_row * row_elements)), memory_(first_ + near.size()) {
    std::memcpy(static_cast<void*>(rows()), near.data(), bytes());
  }
  T* data() { return memory_.data(); }
  void poison() { std::memset(static_cast<void*>(rows()), 0xff, bytes()); }
  void fetch() { std::memcpy(static_cast<void*>(near_.data()), rows(), bytes()); }

 private:
  T* rows() { return memory_.data() + first_; }
  size_t bytes() const { return near_.size() * sizeof(T); }
  Buffer<T>& near_;
  size_t first_;
  sim::SparseMemory<T> memory_;
};

// So many multiprocessors that persistent kernels give each row a block of its own, of which only the last run.
class FarMachine {
 public:
  explicit FarMachine(int64_t blocks, int multiprocessors = 1 << 24)
      : FarMachine(uint3{static_cast<unsigned>(blocks), 0, 0}, multiprocessors) {}
  explicit FarMachine(uint3 blocks, int multiprocessors = 1 << 24) : before_(sim::options()) {
    sim::options().properties.multiprocessors = multiprocessors;
    sim::options().last_blocks = blocks;
  }
  ~FarMachine() {
    sim::options().properties = before_.properties;
    sim::options().last_blocks = before_.last_blocks;
  }
  FarMachine(const FarMachine&) = delete;
  FarMachine& operator=(const FarMachine&) = delete;

 private:
  sim::Options before_;
};

}  // namespace warpsmith::test
