#pragma once
#include <cstdint>

#include "common/dtype.h"

// What a step does for one tensor after it has stored the parameter: moves an average and writes a copy.
namespace warpsmith {

struct StepExtras {
  void* average;        // float32, for float64 parameters float64; moves towards the parameter (average.h). Null: none
  void* copy;           // a float32 parameter, rounded to nearest. Null: none
  Dtype copy_dtype;     // float16 or bfloat16
  bool averages_param;  // with a master: the average follows the parameter, not the master
};
static_assert(sizeof(StepExtras) == 24);

}  // namespace warpsmith
