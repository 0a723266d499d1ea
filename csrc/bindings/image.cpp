#include "kernels/image/image.h"

#include <optional>
#include <string>
#include <vector>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/tensor.h"

namespace warpsmith {
namespace {

constexpr const char* kNormalize = name(Image::normalize_image);

using Numbers = std::vector<double>;

void check_numbers(const char* argument, const Numbers& numbers) {
  if (numbers.size() != kImageChannels)
    refuse(kNormalize, argument, "three numbers", std::to_string(numbers.size()) + " of them");
  for (const double n : numbers) check_finite(kNormalize, argument, n, Dtype::float32);
}

Tensor normalize_image(Tensor x_any, Numbers mean, Numbers std, std::optional<Tensor> flip, ScalarType dtype) {
  if (const ScalarType got = dtype_of(kNormalize, "x", x_any); got != ScalarType::Byte)
    refuse(kNormalize, "x", "uint8", dtype_text(got));
  if (x_any.dim() != 4 || x_any.size(3) != kImageChannels)
    refuse(kNormalize, "x", "shape (N, H, W, 3)", shape_text(x_any));
  check_numbers("mean", mean);
  check_numbers("std", std);
  for (const double s : std)
    if (s < std::numeric_limits<float>::min()) refuse(kNormalize, "std", "positive numbers", short_text(s));
  if (flip) {
    if (const ScalarType got = dtype_of(kNormalize, "flip", *flip); got != ScalarType::Bool)
      refuse(kNormalize, "flip", "bool", dtype_text(got));
    check_shape(kNormalize, "flip", *flip, {x_any.size(0)});
    check_same_device(kNormalize, "flip", *flip, x_any);
    flip = as_contiguous(*flip, kNormalize);
  }
  if (dtype != ScalarType::Float && dtype != ScalarType::Half && dtype != ScalarType::BFloat16)
    refuse(kNormalize, "dtype", "float32, float16 or bfloat16", dtype_text(dtype));
  const bool wide = dtype == ScalarType::Float, half = dtype == ScalarType::Half;
  const int32_t code = wide   ? aoti_torch_dtype_float32()
                       : half ? aoti_torch_dtype_float16()
                              : aoti_torch_dtype_bfloat16();
  const Tensor x = as_contiguous(x_any, kNormalize);
  const int64_t n = x.size(0), h = x.size(1), w = x.size(2), kept = std::max<int64_t>(1, w);
  const int64_t sizes[4] = {n, kImageChannels, h, w};
  const int64_t row = kept * kImageChannels, strides[4] = {std::max<int64_t>(1, h) * row, 1, row, kImageChannels};
  Tensor y = allocate_strided(kNormalize, "the result", sizes, strides, 4, code, x);
  NormalizeImageParams p{.x = static_cast<const uint8_t*>(x.const_data_ptr()),
                         .flip = flip ? static_cast<const uint8_t*>(flip->const_data_ptr()) : nullptr,
                         .y = y.mutable_data_ptr(),
                         .samples = n,
                         .height = h,
                         .width = w,
                         .dtype = wide   ? Dtype::float32
                                  : half ? Dtype::float16
                                         : Dtype::bfloat16};
  for (int c = 0; c < kImageChannels; ++c) {
    p.scale[c] = static_cast<float>(1.0 / (255.0 * std[c]));
    p.shift[c] = static_cast<float>(-mean[c] / std[c]);
  }
  if (n == 0 || p.elems() == 0) return y;
  run_on<normalize_image_cuda, normalize_image_cpu>(kNormalize, x, p);
  return y;
}

WARPSMITH_OPS(m) {
  m.add("normalize_image(Tensor x, float[] mean, float[] std, Tensor? flip, ScalarType dtype) -> Tensor y",
        TORCH_BOX(&normalize_image));
}

}  // namespace
}  // namespace warpsmith
