// Question: at which hidden sizes does what the package chooses for a norm fall behind a copy of the same bytes (bf16)?
// The hidden sizes of models and between them: forward, the same with an offset on the weight (a kernel of any weight),
// and backward, for 64 and 12 million elements. 25 s to build and 4 s to run each.
// runs: -DLAYER=0 -DRESIDUAL=0 -DDROPOUT=0
// runs: -DLAYER=1 -DRESIDUAL=0 -DDROPOUT=0
// runs: -DLAYER=1 -DRESIDUAL=1 -DDROPOUT=1
// links: csrc/kernels/norm/norm.cu
// links: csrc/kernels/norm/forward_float32.cu
// links: csrc/kernels/norm/forward_float16.cu
// links: csrc/kernels/norm/forward_bfloat16.cu
// links: csrc/kernels/norm/backward_float32.cu
// links: csrc/kernels/norm/backward_float16.cu
// links: csrc/kernels/norm/backward_bfloat16.cu
#include "device/launch.h"
#include "kernels/norm/backward_config.h"
#include "kernels/norm/forward_config.h"
#include "kernels/norm/norm.h"
#include "sweep.h"

using namespace warpsmith;
using sweep::allocate, sweep::check, sweep::random_bfloat16;

namespace {

constexpr Norm kOp = DROPOUT    ? LAYER ? Norm::dropout_add_layer_norm : Norm::dropout_add_rms_norm
                     : RESIDUAL ? LAYER ? Norm::add_layer_norm : Norm::add_rms_norm
                     : LAYER    ? Norm::layer_norm
                                : Norm::rms_norm;

constexpr int64_t kColumns[] = {1040, 1152, 1280, 1408, 1536,  1600,  1792,  2048,  2304,  2560, 2688, 2880,
                                3072, 3328, 3584, 3840, 4096,  4352,  4608,  5120,  5376,  5632, 6144, 6656,
                                7168, 7680, 8192, 9216, 10240, 11264, 12288, 13312, 14336, 16384};
constexpr int64_t kElements[] = {int64_t{64} << 20, int64_t{12} << 20};
constexpr int64_t kPartialRows = 1056;

void must(const Status& status) {
  if (!status.ok()) std::printf("refused: %s\n", status.what().c_str()), std::exit(1);
}

struct Tensors {
  void *x, *dy, *residual, *weight, *bias;
  void *y, *residual_out, *dx, *dresidual, *dweight, *dbias;
  float *mean, *rstd, *dweight_partials, *dbias_partials;
  int64_t* seed;
};

NormForwardParams forward_of(const Tensors& t, int64_t rows, int64_t columns) {
  NormForwardParams p;
  p.x = t.x, p.weight = t.weight, p.bias = LAYER ? t.bias : nullptr;
  p.residual = RESIDUAL ? t.residual : nullptr, p.residual_out = RESIDUAL ? t.residual_out : nullptr;
  p.y = t.y, p.rstd = t.rstd, p.mean = LAYER ? t.mean : nullptr;
  p.rows = rows, p.columns = p.x_stride = p.residual_stride = columns, p.eps = 1e-5;
  if (DROPOUT) p.dropout = make_dropout(t.seed, 0.1);
  p.op = kOp;
  p.dtype = p.residual_dtype = p.weight_dtype = Dtype::bfloat16;
  return p;
}

NormBackwardParams backward_of(const Tensors& t, int64_t rows, int64_t columns) {
  NormBackwardParams p;
  p.dy = t.dy, p.s = t.x, p.weight = t.weight, p.rstd = t.rstd, p.mean = LAYER ? t.mean : nullptr;
  p.dresidual_out = RESIDUAL ? t.residual : nullptr;
  p.dx = t.dx, p.dresidual = DROPOUT ? t.dresidual : nullptr;
  p.dweight = t.dweight, p.dweight_partials = t.dweight_partials;
  if (LAYER) p.dbias = t.dbias, p.dbias_partials = t.dbias_partials;
  p.rows = rows, p.columns = p.dy_stride = p.s_stride = p.dresidual_out_stride = columns;
  if (DROPOUT) p.dropout = make_dropout(t.seed, 0.1);
  p.op = kOp;
  p.dtype = p.residual_dtype = p.weight_dtype = Dtype::bfloat16;
  return p;
}

}  // namespace

int main() {
  constexpr size_t kMost = size_t{64} << 20, kLongest = 16384;
  Tensors t{random_bfloat16(kMost, 1),
            random_bfloat16(kMost, 2),
            random_bfloat16(kMost, 3),
            random_bfloat16(kLongest, 4),
            random_bfloat16(kLongest, 5),
            allocate(kMost * 2),
            allocate(kMost * 2),
            allocate(kMost * 2),
            allocate(kMost * 2),
            allocate(kLongest * 2),
            allocate(kLongest * 2),
            allocate<float>(kMost / 1000 * 4),
            allocate<float>(kMost / 1000 * 4),
            allocate<float>(kPartialRows * kLongest * 4),
            allocate<float>(kPartialRows * kLongest * 4),
            allocate<int64_t>(16)};
  check(cudaMemset(t.seed, 1, 16));
  std::printf("layer %d, residual %d, dropout %d: fractions of a copy of the same bytes\n", LAYER, RESIDUAL, DROPOUT);
  for (const int64_t columns : kColumns)
    for (const int64_t elements : kElements) {
      const int64_t rows = elements / columns, count = rows * columns;
      const NormForwardParams forward = forward_of(t, rows, columns);
      const NormBackwardParams backward = backward_of(t, rows, columns);
      NormForwardParams any_weight = forward;
      any_weight.weight_offset = 1;
      DeviceProperties device;
      must(device_properties(device));
      NormProblem problem;
      problem.rows = rows, problem.columns = columns;
      problem.residual_bytes = RESIDUAL ? 2 : 0, problem.layer = LAYER, problem.dropout = DROPOUT;
      problem.multiprocessors = device.multiprocessors, problem.code_capability = device.code_capability;
      problem.max_shared_bytes = device.max_dynamic_shared_bytes;
      const NormConfig f = choose_norm_forward(problem), b = choose_norm_backward(problem);
      // A size that is no multiple of a page is copied up to a tenth slower.
      const auto copy = [&](int64_t bytes) { return sweep::copy_time_of(static_cast<double>(bytes / 8192 * 8192)); };
      const double forward_copy = copy(count * (RESIDUAL ? 8 : 4));
      const double backward_copy = copy(count * (DROPOUT ? 10 : RESIDUAL ? 8 : 6));
      const double forward_us = sweep::time_of([&] { must(norm_forward_cuda(forward, nullptr)); });
      const double any_us = sweep::time_of([&] { must(norm_forward_cuda(any_weight, nullptr)); });
      const double backward_us = sweep::time_of([&] { must(norm_backward_cuda(backward, nullptr)); });
      std::printf(
          "%6lld x %5lld  forward %.3f (%s, %d threads, %d vectors), any weight %.3f, backward %.3f (%s, %lld blocks "
          "of %d threads, clusters of %d, %d vectors, %d rows, %d stages)\n",
          static_cast<long long>(rows), static_cast<long long>(columns), forward_copy / forward_us, name(f.kernel),
          f.threads, f.vectors, forward_copy / any_us, backward_copy / backward_us, name(b.kernel),
          static_cast<long long>(b.blocks), b.threads, b.cluster, b.vectors, b.rows, b.stages);
    }
}
