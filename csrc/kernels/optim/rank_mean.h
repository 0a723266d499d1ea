#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/parallel.h"
#include "common/status.h"

// The mean over ranks of one part of a gradient bucket. Sums in float32 (float64 for float64), from rank 0 to the last
// rank, divides by the number of ranks, and rounds once to the dtype in which the ranks sent their parts.
namespace warpsmith {

constexpr int kMostRankMeanOuts = 16;

// An output of the mean. It may share memory with `own`, but with no other input.
struct RankMeanOut {
  void* data;   // [count]
  Dtype dtype;  // the dtype of the parts, or float32
};

struct RankMeanParams {
  const void* parts;  // [ranks, count], rows `stride` elements apart: the part of each rank
  const void* own;    // [count], the part of `rank`, read instead of its row in `parts`; may be null
  int64_t count;      // elements of a part
  int64_t stride;     // between the rows of `parts`, in elements
  int32_t ranks;      // at least 1
  int32_t rank;       // of `own`
  int32_t out_count;  // at most kMostRankMeanOuts
  Dtype dtype;        // of `parts`: float32, float16, bfloat16; on the CPU also float64
  Dtype own_dtype;    // `dtype`, or float32, which is rounded to `dtype` before it is added
  RankMeanOut outs[kMostRankMeanOuts];
};

Status rank_mean_cuda(const RankMeanParams& params, void* stream);
Status rank_mean_cpu(const RankMeanParams& params, const Parallel& parallel);

}  // namespace warpsmith
