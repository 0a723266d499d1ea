#pragma once
#include <cstdint>

#include "device/platform.h"

// Division by a number that the host knows at launch: a multiplication and a shift instead of about 70 instructions.
// Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), section 4. Any
// thread.
namespace warpsmith::device {

class FastDivide {
 public:
  // divisor: 1 to 2^62.
  explicit FastDivide(int64_t divisor) {
    while ((uint64_t{1} << shift_) < static_cast<uint64_t>(divisor)) ++shift_;
    const auto d = static_cast<unsigned __int128>(divisor), one = static_cast<unsigned __int128>(1);
    multiplier_ = static_cast<uint64_t>(((((one << shift_) - d) << 64) / d) + 1);
  }

  // dividend / divisor for 0 <= dividend < 2^63
  __device__ __forceinline__ int64_t quotient(int64_t dividend) const {
    const uint64_t n = static_cast<uint64_t>(dividend);
    return static_cast<int64_t>((__umul64hi(multiplier_, n) + n) >> shift_);
  }

 private:
  uint64_t multiplier_ = 0;
  int shift_ = 0;
};

}  // namespace warpsmith::device
