#pragma once
#include <cstdint>

#include "common/philox.h"
#include "device/platform.h"

// Random numbers in kernels: the shared generator, and floats from its words. Any thread, no state.
namespace warpsmith::device {

using warpsmith::philox;
using warpsmith::PhiloxCounter;

}  // namespace warpsmith::device
