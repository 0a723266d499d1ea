#include "kernels/quantize/segments.cuh"

#include "common/instances.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/quantize/quantize_launch.h"

namespace warpsmith::quantize {

Status launch_segments(const QuantizeParams& p, const QuantizeConfig& c, void* stream) {
  const int64_t rows = c.flat ? 1 : p.rows, columns = c.flat ? p.rows * p.columns : p.columns;
  const int vector = 16 / size_bytes(p.dtype);
  const bool parts_fit = c.per_row == 1 || c.length % vector == 0;
  const Segments s{.x = p.x,
                   .data = static_cast<uint8_t*>(p.data),
                   .scale = p.scale,
                   .amax = p.amax,
                   .most = c.amax_pass ? p.maxima : nullptr,
                   .counts = p.counts,
                   .columns = columns,
                   .x_stride = p.x_stride,
                   .length = c.length,
                   .count = rows * c.per_row,
                   .per_row = device::FastDivide(c.per_row),
                   .segments_a_row = c.per_row,
                   .scale_of_row = p.scaling == Fp8Scaling::tensor ? 0 : 1,
                   .given = p.given || c.amax_pass,
                   .power_of_two = p.power_of_two,
                   .whole = parts_fit && rows_on_16_bytes(p.x, p.x_stride, rows, p.dtype) && on_16_bytes(p.data) &&
                            (rows == 1 || columns % vector == 0)};
  const LaunchConfig config{.grid = static_cast<unsigned>(c.blocks),
                            .block = static_cast<unsigned>(kSegmentTeams[c.team].threads)};
  return visit_cuda_dtype(p.dtype, [&]<class T>() {
    const auto kernel = instance_of<kSegmentTeams>(
        [&](const SegmentTeam& team) { return team.elems(1) == kSegmentTeams[c.team].elems(1); },
        [&]<class I>() { return p.e5m2 ? &segments<T, float8_e5m2, I> : &segments<T, float8_e4m3, I>; });
    return launch(kernel, config, stream, s);
  });
}

}  // namespace warpsmith::quantize
