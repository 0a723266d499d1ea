#pragma once
#include <cstdint>
#include <type_traits>

namespace warpsmith {

// The caller's thread pool: runs body(begin, end, context) over disjoint pieces of [0, count), each of at least
// `grain`. How the range is cut depends on the number of threads, so a reduction must fix its own chunks and
// parallelise over them.
struct Parallel {
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  void (*run)(int64_t count, int64_t grain, Body body, void* context);

  template <class F> void operator()(int64_t count, int64_t grain, F&& f) const {
    using Callable = std::remove_reference_t<F>;
    run(
        count, grain, [](int64_t begin, int64_t end, void* context) { (*static_cast<Callable*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(&f)));
  }
};

}  // namespace warpsmith
