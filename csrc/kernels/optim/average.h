#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor_list.h"

// The exponential moving average of many tensors.
namespace warpsmith {

// One tensor of the table. Both arrays have numel elements in the same memory order, without gaps.
struct AverageTensor {
  void* average;      // float32, or float64 for float64 values; read and written
  const void* value;  // of value_dtype
  int64_t numel;
  int32_t chunk_elems;
  int32_t chunks;
  Dtype value_dtype;  // float32, float16, bfloat16; on the CPU also float64
};
static_assert(sizeof(AverageTensor) == 40);

// average <- average + weight (value - average). Reads and writes nothing if found_inf is not zero.
struct AverageParams {
  const AverageTensor* tensors;
  const ListChunk* chunks;  // [chunk_count]
  int64_t chunk_count;
  const float* found_inf;  // one element, or null
  double weight;           // from 0 to 1
};

Status average_cuda(const AverageParams& params, void* stream);
Status average_cpu(const AverageParams& params, const Parallel& parallel);

}  // namespace warpsmith
