#pragma once
#include <cstdint>

#include "common/dtype.h"

// What a step does beside its own for one tensor, once its parameter is stored.
namespace warpsmith {

struct OptimBeside {
  void* average;        // float32, of float64 parameters float64: moves towards the parameter (average.h); or null
  void* copy;           // of a float32 parameter: the parameter, rounded to nearest; or null
  Dtype copy_dtype;     // float16 or bfloat16
  bool averages_param;  // the average is that of the parameter also where there is a master
};
static_assert(sizeof(OptimBeside) == 24);

}  // namespace warpsmith
