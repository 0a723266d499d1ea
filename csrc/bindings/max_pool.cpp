#include "kernels/max_pool/max_pool.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/pixels.h"

namespace warpsmith {
namespace {

// The bindings of max_pool2d: checks, views of pixels, allocation, launch. python/warpsmith/ops/_max_pool.py makes the
// same checks in the same words for fake tensors.

constexpr const char *kForward = name(MaxPool::max_pool2d), *kBackward = backward_name(MaxPool::max_pool2d);
constexpr int64_t kMost = int64_t{1} << 30;  // of rows and of columns: their numbers have 32 bits

using Numbers = std::vector<int64_t>;

void check_numbers(const char* op, const char* argument, const Numbers& numbers, int64_t least) {
  if (numbers.size() != 2) refuse(op, argument, "two numbers", std::to_string(numbers.size()) + " of them");
  for (const int64_t n : numbers)
    if (n < least) refuse(op, argument, "numbers >= " + std::to_string(least), std::to_string(n));
}

// How many windows a row or column of `size` pixels has.
int64_t windows(int64_t size, int64_t kernel, int64_t stride, int64_t padding, bool ceil_mode) {
  const int64_t reach = size + 2 * padding - kernel + (ceil_mode ? stride - 1 : 0);
  const int64_t count = reach < 0 ? 0 : reach / stride + 1;
  // The last one may lack pixels, but not all of them.
  return ceil_mode && (count - 1) * stride >= size + padding ? count - 1 : count;
}

void set_shape(const char* op, MaxPoolShape& p, Dtype dtype, int64_t samples, int64_t channels, int64_t height,
               int64_t width, const Numbers& kernel, const Numbers& stride, const Numbers& padding) {
  check_numbers(op, "kernel_size", kernel, 1);
  check_numbers(op, "stride", stride, 1);
  check_numbers(op, "padding", padding, 0);
  if (kernel[0] > kMaxPoolMostArea || kernel[1] > kMaxPoolMostArea || kernel[0] * kernel[1] > kMaxPoolMostArea)
    refuse(op, "kernel_size", "an area of at most " + std::to_string(kMaxPoolMostArea),
           std::to_string(kernel[0]) + " x " + std::to_string(kernel[1]));
  for (int i = 0; i < 2; ++i) {
    if (padding[i] > kernel[i] / 2)
      refuse(op, "padding", "at most half of the kernel's size, " + std::to_string(kernel[i] / 2),
             std::to_string(padding[i]));
    p.kernel[i] = static_cast<int>(kernel[i]);
    p.stride[i] = static_cast<int>(std::min<int64_t>(stride[i], std::numeric_limits<int>::max()));
    p.padding[i] = static_cast<int>(padding[i]);
  }
  if (height > kMost || width > kMost)
    refuse(op, "x", "at most 2^30 rows and columns", std::to_string(height) + " x " + std::to_string(width));
  p.samples = samples;
  p.channels = channels;
  p.height = static_cast<int>(height);
  p.width = static_cast<int>(width);
  p.dtype = dtype;
}

struct Outputs {
  Tensor y, index;
};

Outputs pooled(const Tensor& x_any, const Numbers& kernel, const Numbers& stride, const Numbers& padding,
               bool ceil_mode, int64_t height, int64_t width, bool with_index) {
  const Dtype dtype = float_dtype(kForward, "x", x_any);
  if (x_any.dim() != 4 || x_any.size(1) == 0 || x_any.size(2) == 0 || x_any.size(3) == 0)
    refuse(kForward, "x", "shape (N, C, H, W) with C, H and W >= 1", shape_text(x_any));
  if (height != x_any.size(2) || width != x_any.size(3))
    refuse(kForward, "x", std::to_string(height) + " rows of " + std::to_string(width) + " pixels", shape_text(x_any));
  MaxPoolForwardParams p;
  set_shape(kForward, p, dtype, x_any.size(0), x_any.size(1), height, width, kernel, stride, padding);
  const int64_t rows = windows(height, kernel[0], p.stride[0], padding[0], ceil_mode);
  const int64_t columns = windows(width, kernel[1], p.stride[1], padding[1], ceil_mode);
  if (rows < 1 || columns < 1)
    refuse(kForward, "x",
           "at least (" + std::to_string(kernel[0]) + ", " + std::to_string(kernel[1]) + ") pixels with its padding",
           shape_text(x_any));
  p.out_height = static_cast<int>(rows);
  p.out_width = static_cast<int>(columns);
  const Pixels x = as_pixels(kForward, "x", x_any, dtype);
  const int64_t c = p.channels, sizes[4] = {p.samples, c, rows, columns};
  const int64_t strides[4] = {rows * columns * c, 1, columns * c, c}, pixels[4] = {p.samples, rows, columns, c};
  const int32_t bytes = aoti_torch_dtype_uint8();
  Outputs out{allocate_strided(kForward, "y", sizes, strides, 4, dtype_code(x_any), x_any),
              with_index ? allocate(kForward, "index", pixels, 4, bytes, x_any) : nothing(kForward, bytes, x_any)};
  if (p.samples == 0) return out;
  p.x = x.tensor.const_data_ptr();
  p.x_stride = x.stride;
  p.y = out.y.mutable_data_ptr();
  if (with_index) p.index = static_cast<uint8_t*>(out.index.mutable_data_ptr());
  run_on<max_pool2d_forward_cuda, max_pool2d_forward_cpu>(kForward, x_any, p);
  return out;
}

std::tuple<Tensor, Tensor> forward(Tensor x, Numbers kernel_size, Numbers stride, Numbers padding, bool ceil_mode,
                                   int64_t height, int64_t width) {
  const Outputs out = pooled(x, kernel_size, stride, padding, ceil_mode, height, width, true);
  return {out.y, out.index};
}

Tensor inference(Tensor x, Numbers kernel_size, Numbers stride, Numbers padding, bool ceil_mode, int64_t height,
                 int64_t width) {
  return pooled(x, kernel_size, stride, padding, ceil_mode, height, width, false).y;
}

Tensor backward(Tensor dy_any, Tensor index_any, Numbers kernel_size, Numbers stride, Numbers padding, int64_t height,
                int64_t width) {
  const Dtype dtype = float_dtype(kBackward, "dy", dy_any);
  if (dy_any.dim() != 4) refuse(kBackward, "dy", "shape (N, C, H, W)", shape_text(dy_any));
  if (const ScalarType got = dtype_of(kBackward, "index", index_any); got != ScalarType::Byte)
    refuse(kBackward, "index", "uint8", dtype_text(got));
  check_shape(kBackward, "index", index_any, {dy_any.size(0), dy_any.size(2), dy_any.size(3), dy_any.size(1)});
  check_same_device(kBackward, "index", index_any, dy_any);
  MaxPoolBackwardParams p;
  set_shape(kBackward, p, dtype, dy_any.size(0), dy_any.size(1), height, width, kernel_size, stride, padding);
  for (const bool row : {true, false}) {
    const int64_t found = dy_any.size(row ? 2 : 3), size = row ? height : width, i = row ? 0 : 1;
    const auto count = [&](bool ceil_mode) {
      return windows(size, kernel_size[i], p.stride[i], padding[i], ceil_mode);
    };
    if (found < 1 || (found != count(false) && found != count(true)))
      refuse(kBackward, "dy", std::to_string(count(false)) + (row ? " rows" : " columns"), shape_text(dy_any));
  }
  p.out_height = static_cast<int>(dy_any.size(2));
  p.out_width = static_cast<int>(dy_any.size(3));
  const Pixels dy = as_pixels(kBackward, "dy", dy_any, dtype);
  const int64_t c = p.channels, sizes[4] = {p.samples, c, height, width};
  const int64_t strides[4] = {height * width * c, 1, width * c, c};
  Tensor dx = allocate_strided(kBackward, "dx", sizes, strides, 4, dtype_code(dy_any), dy_any);
  if (p.samples == 0 || c == 0) return dx;
  const Tensor index = as_contiguous(index_any, kBackward);
  p.dy = dy.tensor.const_data_ptr();
  p.dy_stride = dy.stride;
  p.index = static_cast<const uint8_t*>(index.const_data_ptr());
  p.dx = dx.mutable_data_ptr();
  run_on<max_pool2d_backward_cuda, max_pool2d_backward_cpu>(kBackward, dy_any, p);
  return dx;
}

WARPSMITH_OPS(m) {
  const std::string sizes = "int[] kernel_size, int[] stride, int[] padding";
  const std::string arguments = "(Tensor x, " + sizes + ", bool ceil_mode, SymInt height, SymInt width) -> ";
  m.add_forward("max_pool2d", arguments + "(Tensor y, Tensor index)", TORCH_BOX(&forward));
  m.add("max_pool2d_inference" + arguments + "Tensor", TORCH_BOX(&inference));
  m.add("max_pool2d_backward(Tensor dy, Tensor index, " + sizes + ", SymInt height, SymInt width) -> Tensor dx",
        TORCH_BOX(&backward));
}

}  // namespace
}  // namespace warpsmith
