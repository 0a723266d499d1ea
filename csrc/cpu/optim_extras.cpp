#include <cstring>

#include "cpu/optim_loops.h"
#include "kernels/quantize/quantize.h"

// The averages, copies and zeroed gradients of a step (kernels/optim/step_extras.h), and its casts of weights.
namespace warpsmith::cpu::optim {
namespace {

void* from(void* array, Dtype dtype, int64_t first) { return static_cast<char*>(array) + first * size_bytes(dtype); }

}  // namespace

void do_extras(const OptimParams& p, int64_t tensor, int64_t first, int64_t count, bool skips) {
  if (count == 0) return;
  const OptimTensor& t = p.tensors[tensor];
  const Dtype dtype = param_dtype(p.storage);
  if (p.zero_grads && p.grads[tensor]) {
    const Gradient grad = gradient_of(p.grads[tensor], dtype);
    const auto bytes = static_cast<size_t>(count * size_bytes(grad.dtype));
    std::memset(from(const_cast<void*>(grad.at), grad.dtype, first), 0, bytes);
  }
  if (!p.extras || skips) return;
  const StepExtras& extras = p.extras[tensor];
  if (extras.average) {
    const bool of_master = has_master(p.storage) && !extras.averages_param;
    const Dtype of = of_master ? Dtype::float32 : dtype, wide = dtype == Dtype::float64 ? dtype : Dtype::float32;
    average_values(from(extras.average, wide, first), from(of_master ? t.extra : t.param, of, first), of, count,
                   p.ema_weight);
  }
  if (!extras.copy) return;
  const float* param = static_cast<const float*>(t.param) + first;
  void* copy = from(extras.copy, extras.copy_dtype, first);
  if (extras.copy_dtype == Dtype::float16)
    narrow(param, static_cast<float16*>(copy), count);
  else
    narrow(param, static_cast<bfloat16*>(copy), count);
}

Status cast_weights(const OptimParams& p, const Parallel& parallel) {
  for (int64_t i = 0; i < p.tensor_count; ++i) {
    const OptimTensor& t = p.tensors[i];
    if (!takes_part(p, i) || !p.casts[i].data) continue;
    QuantizeParams cast{};
    cast.x = t.param;
    cast.data = p.casts[i].data;
    cast.scale = p.casts[i].scale;
    cast.rows = t.numel / t.row_elems;
    cast.columns = cast.x_stride = t.row_elems;
    cast.scaling = Fp8Scaling::row;
    cast.power_of_two = true;
    cast.dtype = param_dtype(p.storage);
    WARPSMITH_RETURN_IF_FAILED(quantize_cpu(cast, parallel));
  }
  return {};
}

}  // namespace warpsmith::cpu::optim
