#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"

// The entries of a column of gradient addresses. If a gradient's dtype differs from its parameter's, its entry also
// holds the dtype, in the upper four bits, which no address uses.
namespace warpsmith {

constexpr int kGradientDtypeShift = 60;

// The upper bits of the entry of a gradient whose dtype differs.
constexpr int64_t gradient_mark(Dtype dtype) {
  return (int64_t{1} + static_cast<int64_t>(dtype)) << kGradientDtypeShift;
}

struct Gradient {
  const void* at;
  Dtype dtype;
};

WARPSMITH_HOST_DEVICE Gradient gradient_of(const void* entry, Dtype of_param) {
  const auto word = reinterpret_cast<uint64_t>(entry);
  const auto mark = static_cast<int>(word >> kGradientDtypeShift);
  const uint64_t address = word & ((uint64_t{1} << kGradientDtypeShift) - 1);
  return {reinterpret_cast<const void*>(address), mark ? static_cast<Dtype>(mark - 1) : of_param};
}

}  // namespace warpsmith
