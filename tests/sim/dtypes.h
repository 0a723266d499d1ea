#pragma once
#include "common/dtype.h"
#include "common/half.h"

// The dtype of a storage type.
namespace warpsmith::test {

template <class T> inline constexpr Dtype kDtype = Dtype::float32;
template <> inline constexpr Dtype kDtype<float16> = Dtype::float16;
template <> inline constexpr Dtype kDtype<bfloat16> = Dtype::bfloat16;

}  // namespace warpsmith::test
