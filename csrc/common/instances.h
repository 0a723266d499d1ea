#pragma once
#include <cstddef>
#include <iterator>
#include <utility>

// One list of the configurations that a kernel is compiled for. The chooser reads it at run time, and the launcher
// instantiates the kernel from it:
//
//   struct Block { int threads, blocks; };
//   constexpr Block kBlocks[] = {{128, 4}, {256, 2}};
//   template <class T, class I> __global__ void __launch_bounds__(I::value.threads, I::value.blocks) kernel(T* x);
//   ...
//   const auto chosen = instance_of<kBlocks>([&](const Block& b) { return b.threads == c.threads; },
//                                            [&]<class I>() { return &kernel<T, I>; });
namespace warpsmith {

// An entry of a list as a type: nvcc 13.0 writes code that does not compile for a kernel with a template argument that
// is a struct in a namespace.
template <auto kEntry> struct Instance {
  static constexpr auto value = kEntry;
};

// Calls use.template operator()<Instance<entry>>() for the first entry for which matches(entry); returns null if there
// is none.
template <const auto& kList, class Matches, class Use> auto instance_of(Matches&& matches, Use&& use) {
  decltype(use.template operator()<Instance<kList[0]>>()) found = nullptr;
  [&]<size_t... i>(std::index_sequence<i...>) {
    (void)((matches(kList[i]) ? (found = use.template operator()<Instance<kList[i]>>(), true) : false) || ...);
  }(std::make_index_sequence<std::size(kList)>{});
  return found;
}

}  // namespace warpsmith
