#pragma once
#include <cmath>
#include <cstdint>
#include <string>

#include "common/philox.h"
#include "harness.h"

// What random rounding must give.
namespace warpsmith::test {

// The bits must be those that number `array` of the four random numbers of `element` gives in this step; where float32
// arithmetic may decide otherwise than float64, either neighbour.
inline void expect_drawn(const std::string& name, bfloat16 got, double want, uint64_t seed, uint32_t step,
                         uint64_t element, int array) {
  if (std::abs(want) <= 1e-4) return;  // too small for an error that is absolute
  const uint64_t pair = element / 2;
  const PhiloxCounter words =
      philox<7>({{static_cast<uint32_t>(pair), static_cast<uint32_t>(pair >> 32), step, 0x6f707469u}}, seed);
  const uint64_t number = element % 2 * 4 + static_cast<uint64_t>(array);
  const double random = words.word[number / 2] >> (number % 2 * 16) & 0xffff;
  const double ulp = std::ldexp(1.0, std::ilogb(want) - 7), magnitude = std::abs(want) / ulp;
  const double low = std::floor(magnitude), sum = (magnitude - low) * 65536 + random;
  const double slack = 65536 * (2e-6 + 0x1p-22 * std::abs(want)) / ulp;
  const double down = std::copysign(low * ulp, want), up = std::copysign((low + 1) * ulp, want), is = to_float(got);
  const bool fits = std::abs(sum - 65536) <= slack ? is == down || is == up : is == (sum < 65536 ? down : up);
  expect(fits,
         name + " of element " + std::to_string(element) + ": " + std::to_string(is) + " of " + std::to_string(want));
}

}  // namespace warpsmith::test
