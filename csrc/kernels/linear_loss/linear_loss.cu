#include <algorithm>
#include <string>

#include "common/alignment.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/linear_loss/column_sums.cuh"
#include "kernels/linear_loss/finish.cuh"

namespace warpsmith {
namespace {

using namespace linear_loss;

constexpr int64_t kBlocksAMultiprocessor = 8;  // 2,048 threads

template <class Kernel> Status launch_over(Kernel kernel, const LinearFinishParams& p, int elems, void* stream) {
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const int64_t blocks = ceil_div(p.count, int64_t{kFinishThreads} * elems);
  LaunchConfig grid;
  grid.grid.x = static_cast<unsigned>(std::min(blocks, kBlocksAMultiprocessor * device.multiprocessors));
  grid.block.x = kFinishThreads;
  return launch(kernel, grid, stream, p);
}

template <class In, class Out> Status run_finish(const LinearFinishParams& p, void* stream) {
  if (on_16_bytes(p.x) && on_16_bytes(p.out))
    return launch_over(finish<In, Out, kFinishElems>, p, kFinishElems, stream);
  return launch_over(finish<In, Out, 1>, p, 1, stream);
}

template <class T> Status run_sum(const LinearFinishParams& p, void* stream) {
  if (on_16_bytes(p.x) && on_16_bytes(p.sum))
    return launch_over(finish_into_sum<T, kFinishElems>, p, kFinishElems, stream);
  return launch_over(finish_into_sum<T, 1>, p, 1, stream);
}

constexpr int64_t kLeastRowsASlice = 64;  // for each, 4 bytes of partial sums a column are written and read
constexpr int64_t kMostSlices = 64;

// Elements of one access.
int vector_elems(const ColumnSumsParams& p) {
  return on_16_bytes(p.x) && on_16_bytes(p.x_stride, p.dtype) ? 16 / size_bytes(p.dtype) : 1;
}

int64_t column_tiles(const ColumnSumsParams& p) {
  return ceil_div(p.columns, int64_t{kColumnThreads} * vector_elems(p));
}

}  // namespace

Status linear_finish_cuda(const LinearFinishParams& p, void* stream) {
  if (p.count == 0) return {};
  const bool widened = p.dtype == Dtype::float32 && size_bytes(p.out_dtype) == 2 && !p.sum;
  if (p.dtype == Dtype::float64 || (p.dtype != p.out_dtype && !widened))
    return Status::unsupported(std::string("no CUDA kernel from ") + name(p.dtype) + " to " + name(p.out_dtype));
  return visit_cuda_dtype(p.out_dtype, [&]<class T>() {
    if (p.sum) return run_sum<T>(p, stream);
    return widened ? run_finish<float, T>(p, stream) : run_finish<T, T>(p, stream);
  });
}

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
    LaunchConfig first, second;
    first.grid = dim3(static_cast<unsigned>(column_tiles(p)), static_cast<unsigned>(slices));
    second.grid.x = static_cast<unsigned>(ceil_div(p.columns, kColumnThreads));
    first.block.x = second.block.x = kColumnThreads;
    const int64_t rows = ceil_div(p.rows, slices);
    constexpr int N = 16 / sizeof(T);
    WARPSMITH_RETURN_IF_FAILED(vector_elems(p) == 1 ? launch(sum_slices<T, 1>, first, stream, p, rows)
                                                    : launch(sum_slices<T, N>, first, stream, p, rows));
    return slices == 1 ? Status() : launch(add_slices, second, stream, p, slices);
  });
}

}  // namespace warpsmith
