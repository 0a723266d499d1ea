#include <algorithm>
#include <string>

#include "common/launch.h"
#include "kernels/linear_loss/linear_log_prob_kernel.cuh"

namespace warpsmith {
namespace {

using linear_loss::kColumnThreads;

constexpr int64_t kBlocksAMultiprocessor = 8;
constexpr int64_t kLeastRowsASlice = 64;  // 4 bytes of partial sums are written and read for so many rows
constexpr int64_t kMostSlices = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements of one access.
int vector_elems(const ColumnSumsParams& p) {
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.x_stride * size_bytes(p.dtype) % 16 == 0;
  return aligned ? 16 / size_bytes(p.dtype) : 1;
}

int64_t column_tiles(const ColumnSumsParams& p) {
  return ceil_div(p.columns, int64_t{kColumnThreads} * vector_elems(p));
}

template <class T> Status run(const ColumnSumsParams& p, void* stream) {
  if (p.columns == 0) return {};
  int64_t slices = 0;
  WARPSMITH_RETURN_IF_FAILED(column_sums_slices_cuda(p, &slices));
  LaunchConfig first;
  first.grid = dim3(static_cast<unsigned>(column_tiles(p)), static_cast<unsigned>(slices));
  first.block.x = kColumnThreads;
  const int64_t rows = ceil_div(p.rows, slices);
  constexpr int N = 16 / sizeof(T);
  WARPSMITH_RETURN_IF_FAILED(vector_elems(p) == 1 ? launch(linear_loss::sum_slices<T, 1>, first, stream, p, rows)
                                                  : launch(linear_loss::sum_slices<T, N>, first, stream, p, rows));
  if (slices == 1) return {};
  LaunchConfig second;
  second.grid.x = static_cast<unsigned>(ceil_div(p.columns, kColumnThreads));
  second.block.x = kColumnThreads;
  return launch(linear_loss::add_slices, second, stream, p, slices);
}

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
  switch (p.dtype) {
    case Dtype::float32: return run<float>(p, stream);
    case Dtype::float16: return run<float16>(p, stream);
    case Dtype::bfloat16: return run<bfloat16>(p, stream);
    case Dtype::float64: break;
  }
  return Status::unsupported(std::string("no CUDA kernel for ") + name(p.dtype));
}

}  // namespace warpsmith
