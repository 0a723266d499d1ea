#include "kernels/quantize/quantize.h"

#include <cstring>
#include <string>

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/quantize/dequantize.cuh"
#include "kernels/quantize/quantize_launch.h"
#include "kernels/quantize/scales.cuh"
#include "kernels/quantize/tiles.cuh"
#include "kernels/quantize/transpose_bytes.cuh"
#include "tiles/sum_partials.cuh"

namespace warpsmith {

using namespace quantize;

namespace {

Status launch_scales(const Magnitudes& p, void* stream) {
  if (p.items == 0) return {};
  const LaunchConfig config{.grid = static_cast<unsigned>(ceil_div(p.items, kScaleThreads)), .block = kScaleThreads};
  return launch(make_scales, config, stream, p);
}

// Zeros behind an address; null: none. A copy engine's write needs less of the host than a kernel.
Status clear(void* from, size_t bytes, [[maybe_unused]] void* stream) {
  if (!from || bytes == 0) return {};
#ifdef WARPSMITH_SIM
  std::memset(from, 0, bytes);
#else
  if (const cudaError_t code = cudaMemsetAsync(from, 0, bytes, static_cast<cudaStream_t>(stream)); code != cudaSuccess)
    return Status::device(std::string("cudaMemsetAsync: ") + cudaGetErrorString(code));
#endif
  return {};
}

// x alone.
Tiles tiles_of(const void* x, int64_t rows, int64_t columns, int64_t stride, Dtype dtype) {
  Tiles t{};
  t.x = x;
  t.rows = rows;
  t.columns = columns;
  t.x_stride = rows > 1 ? stride : 0;  // copies of rows that are not there begin on 16 bytes too
  t.down = ceil_div(rows, kTile);
  t.across = ceil_div(columns, kTile);
  t.whole = rows_on_16_bytes(x, stride, rows, dtype);
  return t;
}

// The largest magnitudes of what no block sees alone.
Status find_maxima(const QuantizeParams& p, Tiles* t, void* stream) {
  float* maxima = p.maxima;
  if (p.scaling == Fp8Scaling::tensor) t->most = maxima;
  if (p.scaling == Fp8Scaling::row && p.data) {
    t->row_max = maxima;
    maxima += p.rows;
  }
  if (p.scaling == Fp8Scaling::row && p.transposed) t->column_max = maxima;
  return t->down * t->across > 0 ? launch_amax(p.dtype, *t, stream) : Status();
}

// Rows without columns, columns without rows and a tensor without elements have the scale 1.
Status scales_of_nothing(const QuantizeParams& p, void* stream) {
  const auto ones = [&](float* to, int64_t items) { return launch_scales({nullptr, to, items, {}, true}, stream); };
  if (p.given || p.scaling == Fp8Scaling::block || p.scaling == Fp8Scaling::block2d) return {};
  if (p.scaling == Fp8Scaling::tensor) return ones(p.scale, 1);
  if (p.data) WARPSMITH_RETURN_IF_FAILED(ones(p.scale, p.rows));
  return p.transposed ? ones(p.transposed_scale, p.columns) : Status();
}

Status cast_tiles(const QuantizeParams& p, const QuantizeConfig& c, Tiles t, void* stream) {
  t.data = static_cast<uint8_t*>(p.data);
  t.transposed = static_cast<uint8_t*>(p.transposed);
  t.row_scale = p.scale;
  t.column_scale = p.transposed_scale;
  t.column_sums = p.column_sums ? p.workspace : nullptr;
  t.counts = p.counts;
  t.square = p.scaling == Fp8Scaling::tensor || p.scaling == Fp8Scaling::block2d;
  t.power_of_two = p.power_of_two;
  t.whole_data = p.columns % (16 / size_bytes(p.dtype)) == 0 || p.rows == 1;
  t.whole_transposed = p.rows % 16 == 0 || p.columns == 1;
  t.of_square = !p.given && !c.amax_pass;
  t.from_max = c.amax_pass;
  if (p.amax) t.most = p.amax;
  if (c.blocks > 0) {
    WARPSMITH_RETURN_IF_FAILED(launch_casts(p.dtype, p.e5m2, t, stream));
  } else if (c.amax_pass) {
    WARPSMITH_RETURN_IF_FAILED(scales_of_nothing(p, stream));
  }
  if (!p.column_sums) return {};
  return visit_cuda_dtype(p.sums_dtype, [&]<class T>() {
    return tiles::launch_sum_partials<T>(t.column_sums, p.column_sums, t.down, p.columns, stream);
  });
}

}  // namespace

Status quantize_cuda(const QuantizeParams& p, void* stream) {
  if (size_bytes(p.dtype) > 4) return no_cuda_kernel(p.dtype);
  const QuantizeConfig c = choose_quantize(problem_of(p));
  if (!p.counts_are_zeros) WARPSMITH_RETURN_IF_FAILED(clear(p.counts, 2 * sizeof *p.counts, stream));
  Tiles t = tiles_of(p.x, p.rows, p.columns, p.x_stride, p.dtype);
  t.column_factor = p.column_factor;
  t.row_factor = p.row_factor;
  t.factor_rows = p.factor_rows;
  if (c.amax_pass) WARPSMITH_RETURN_IF_FAILED(find_maxima(p, &t, stream));
  if (c.tiles) return cast_tiles(p, c, t, stream);
  return c.blocks > 0 ? launch_segments(p, c, stream) : scales_of_nothing(p, stream);
}

Status fp8_amax_cuda(const Fp8AmaxParams& p, void* stream) {
  if (size_bytes(p.dtype) > 4) return no_cuda_kernel(p.dtype);
  Tiles t = tiles_of(p.x, p.rows, p.columns, p.x_stride, p.dtype);
  WARPSMITH_RETURN_IF_FAILED(clear(p.amax, (p.by_row ? p.rows : 1) * sizeof *p.amax, stream));
  (p.by_row ? t.row_max : t.most) = p.amax;
  return t.down * t.across > 0 ? launch_amax(p.dtype, t, stream) : Status();
}

Status fp8_scale_cuda(const Fp8ScaleParams& p, void* stream) {
  return launch_scales({p.amax, p.scale, p.count, p.e5m2 ? kE5m2Limits : kE4m3Limits, p.power_of_two}, stream);
}

Status transpose_bytes_cuda(const TransposeBytesParams& p, void* stream) {
  if (p.rows_to == 0 || p.columns == 0) return {};
  const bool whole = on_16_bytes(p.data) && p.columns % 16 == 0,
             whole_to = on_16_bytes(p.transposed) && p.rows_to % 16 == 0;
  const LaunchConfig config{.grid = static_cast<unsigned>(ceil_div(p.rows_to, kTile) * ceil_div(p.columns, kTile)),
                            .block = kTransposeThreads};
  return launch(transpose_bytes, config, stream, p, whole, whole_to);
}

Status dequantize_cuda(const DequantizeParams& p, void* stream) {
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    constexpr int N = 16 / sizeof(T), kParts = kDequantizeThreads / 32;
    const int64_t parts_a_row = ceil_div(p.columns, 32 * N), parts = p.rows * parts_a_row;
    if (parts == 0) return Status();
    const bool whole = on_16_bytes(p.data) && (p.rows == 1 || (p.data_stride % N == 0 && p.columns % N == 0));
    const LaunchConfig config{.grid = static_cast<unsigned>(ceil_div(parts, kParts)), .block = kDequantizeThreads};
    const auto kernel = p.e5m2 ? &dequantize<T, float8_e5m2> : &dequantize<T, float8_e4m3>;
    return launch(kernel, config, stream, p, parts, device::FastDivide(parts_a_row), parts_a_row, whole);
  });
}

}  // namespace warpsmith
