#pragma once
#include "kernels/quantize/quantize.h"

// The parts of quantize_cuda, compiled apart.
namespace warpsmith::quantize {

struct Tiles;

Status launch_segments(const QuantizeParams& p, const QuantizeConfig& c, void* stream);
// The pass over x before: partial maxima.
Status launch_amax(Dtype dtype, const Tiles& tiles, void* stream);
Status launch_casts(Dtype dtype, bool e5m2, const Tiles& tiles, void* stream);

}  // namespace warpsmith::quantize
