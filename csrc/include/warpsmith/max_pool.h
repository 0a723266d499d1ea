#pragma once
#include <vector>

#include "warpsmith/op.h"

// Max pooling with gradients.
namespace warpsmith {

struct MaxPool2dOptions {
  std::vector<int64_t> stride = {};  // empty: the kernel's size
  std::vector<int64_t> padding = {0, 0};
  bool ceil_mode = false;
};

// The largest element of each window, for x (N, C, H, W), best in channels_last, which y is in. Two numbers each: of
// rows, of columns. Gradient for x. Everything else, errors included: as warpsmith.max_pool2d in Python.
inline at::Tensor max_pool2d(const at::Tensor& x, const std::vector<int64_t>& kernel_size,
                             const MaxPool2dOptions& options = {}) {
  static const detail::Op op({.name = "max_pool2d"});
  const bool pixels = x.defined() && x.dim() == 4;  // else refused
  return detail::call(op, {x, kernel_size, options.stride.empty() ? kernel_size : options.stride, options.padding,
                           options.ceil_mode, pixels ? x.size(2) : 0, pixels ? x.size(3) : 0})[0];
}

}  // namespace warpsmith
