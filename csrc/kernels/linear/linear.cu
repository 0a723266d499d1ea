#include "kernels/linear/linear.h"

#include <algorithm>

#include "common/alignment.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/linear/column_sums.cuh"
#include "kernels/linear/linear_config.h"
#include "kernels/linear/mirror.cuh"
#include "tiles/sum_partials.cuh"

namespace warpsmith {
namespace {

using namespace linear;

constexpr int64_t kBlocksAMultiprocessor = 4;  // 64 registers a thread
constexpr int64_t kLeastRowsASlice = kColumnWarps * kRowsAStep;
constexpr int64_t kMostSlices = 288;  // which a block of `sum_partials` loads at once

// Elements of one access.
int vector_elems(const ColumnSumsParams& p) {
  return on_16_bytes(p.x) && on_16_bytes(p.x_stride, p.dtype) ? 16 / size_bytes(p.dtype) : 1;
}

int64_t column_tiles(const ColumnSumsParams& p) { return ceil_div(p.columns, int64_t{kColumnLanes} * vector_elems(p)); }

}  // namespace

Status column_sums_slices_cuda(const ColumnSumsParams& p, int64_t* slices) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const int64_t wanted =
      ceil_div(kBlocksAMultiprocessor * device.multiprocessors, std::max<int64_t>(1, column_tiles(p)));
  *slices = std::max<int64_t>(1, std::min({wanted, p.rows / kLeastRowsASlice, kMostSlices}));
  return {};
}

Status column_sums_cuda(const ColumnSumsParams& p, void* stream) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    if (p.columns == 0) return Status();
    int64_t slices = 0;
    WARPSMITH_RETURN_IF_FAILED(column_sums_slices_cuda(p, &slices));
    const LaunchConfig config{.grid = dim3(static_cast<unsigned>(column_tiles(p)), static_cast<unsigned>(slices)),
                              .block = kColumnLanes * kColumnWarps};
    const int64_t rows = ceil_div(ceil_div(p.rows, slices), int64_t{kRowsAStep}) * kRowsAStep;
    constexpr int N = 16 / sizeof(T);
    WARPSMITH_RETURN_IF_FAILED(vector_elems(p) == 1 ? launch(sum_slices<T, 1>, config, stream, p, rows)
                                                    : launch(sum_slices<T, N>, config, stream, p, rows));
    return visit_cuda_dtype(p.sums_dtype, [&]<class W>() {
      return tiles::launch_sum_partials<W>(p.partials, p.sums, slices, p.columns, stream, nullptr, p.add);
    });
  });
}

Status mirror_cuda(const MirrorParams& p, void* stream) {
  const int64_t sides = ceil_div(p.n, kMirrorSide), tiles = p.batches * sides * sides;
  if (tiles == 0) return {};
  if (tiles > INT32_MAX) return Status::unsupported("symmetric matrices of more than 2^31 tiles of 32 x 32 elements");
  const LaunchConfig config{.grid = static_cast<unsigned>(tiles), .block = kMirrorThreads};
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    return launch(mirror<Bits>, config, stream, static_cast<Bits*>(p.x), p.n, static_cast<unsigned>(sides));
  });
}

Status linear_problem_on_device(LinearProblem* problem) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  problem->code_capability = device.code_capability;
  return {};
}

}  // namespace warpsmith
