#pragma once
#include <cstdint>
#include <iterator>

#include "common/dtype.h"
#include "common/host_device.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor_list.h"
#include "kernels/optim/beside.h"
#include "kernels/optim/gradient.h"
#include "kernels/optim/optim_ops.h"
#include "kernels/optim/optimizers.h"
#include "kernels/optim/quantize.h"
#include "kernels/optim/refine.h"

namespace warpsmith {

WARPSMITH_DEFINE_OPS(Optim, WARPSMITH_OPTIM_OPS)

// What a table's arrays are stored in. Arithmetic is float32 (float64 of float64) whatever it is; what is stored in 16
// bits is rounded once a step: to nearest, unless another rounding is named.
enum class Storage : uint8_t {
  float32,               // all arrays
  float64,               // all arrays; on the CPU
  bfloat16,              // all arrays: what torch does to a model in bfloat16
  float16,               // all arrays
  bfloat16_master,       // parameters and gradients; states and masters in float32
  float16_master,        // parameters and gradients; states and masters in float32
  bfloat16_states,       // the states; parameters and gradients in float32
  bfloat16_stochastic,   // all arrays; parameters and states are rounded up or down at random
  bfloat16_compensated,  // all arrays, and what rounding drops of the parameter, in bfloat16 too
  bfloat16_remainder,    // parameters and gradients, and 16 bits that make the parameter a float32; states in float32
  float32_8bit,          // parameters and gradients; states as 8-bit codes with float32 scales, or in float32
  bfloat16_8bit,         // the same with 16-bit parameters and gradients
  float16_8bit,
};
constexpr const char* kStorageNames[] = {"float32",
                                         "float64",
                                         "bfloat16",
                                         "float16",
                                         "bfloat16_master",
                                         "float16_master",
                                         "bfloat16_states",
                                         "bfloat16_stochastic",
                                         "bfloat16_compensated",
                                         "bfloat16_remainder",
                                         "float32_8bit",
                                         "bfloat16_8bit",
                                         "float16_8bit"};
constexpr int kStorages = static_cast<int>(std::size(kStorageNames));

constexpr Dtype param_dtype(Storage s) {
  switch (s) {
    case Storage::float64: return Dtype::float64;
    case Storage::bfloat16:
    case Storage::bfloat16_master:
    case Storage::bfloat16_stochastic:
    case Storage::bfloat16_compensated:
    case Storage::bfloat16_remainder:
    case Storage::bfloat16_8bit: return Dtype::bfloat16;
    case Storage::float16:
    case Storage::float16_master:
    case Storage::float16_8bit: return Dtype::float16;
    default: return Dtype::float32;
  }
}
constexpr bool is_8bit(Storage s) {
  return s == Storage::float32_8bit || s == Storage::bfloat16_8bit || s == Storage::float16_8bit;
}
// The states that an optimizer may have as 8-bit codes, a bit each; none: 8-bit storages do not take it.
constexpr uint32_t states_of_8bit(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::adamw:
    case Optimizer::adam: return 0b011;
    case Optimizer::sgd:
    case Optimizer::lion: return 0b1;
    default: return 0;
  }
}
constexpr bool has_master(Storage s) { return s == Storage::bfloat16_master || s == Storage::float16_master; }

// How a bfloat16 parameter keeps what rounding to nearest would lose.
enum class Refinement : uint8_t {
  none,
  stochastic,   // in the mean: parameter and states are rounded up with the probability of the part that is dropped
  compensated,  // the part that is dropped, in bfloat16: the parameter's value is the sum of both
  remainder,    // the part that is dropped, exact, in 16 bits: the parameter's value is the float32 of both
};
constexpr Refinement refinement_of(Storage s) {
  switch (s) {
    case Storage::bfloat16_stochastic: return Refinement::stochastic;
    case Storage::bfloat16_compensated: return Refinement::compensated;
    case Storage::bfloat16_remainder: return Refinement::remainder;
    default: return Refinement::none;
  }
}
// Whether there is an array of what rounding drops, 16 bits an element.
constexpr bool keeps_dropped(Refinement r) { return r == Refinement::compensated || r == Refinement::remainder; }
constexpr bool has_extra(Storage s) { return has_master(s) || keeps_dropped(refinement_of(s)); }
// Of 8-bit storages: that of states which are not codes.
constexpr Dtype state_dtype(Storage s) {
  if (s == Storage::bfloat16_states) return Dtype::bfloat16;
  return has_master(s) || is_8bit(s) || s == Storage::bfloat16_remainder ? Dtype::float32 : param_dtype(s);
}

// One tensor of the table. All its arrays have numel elements in the same memory order, in the dtypes of the storage.
struct OptimTensor {
  void* param;  // read and written; only written where there is a master
  union {
    // What the storage keeps of the parameter beside it, read and written: the float32 master, which is the parameter
    // before it was rounded, the bfloat16 compensation, or the int16 remainder. Of 8-bit
    // storages the float32 scales, [states, quant_blocks(numel)]; null: this tensor's states are float32. Null in
    // other storages.
    void* extra;
    uint64_t first_elem;  // bfloat16_stochastic: its first element's index among those of all tensors
  };
  void* states[kOptimMaxStates];  // in the order of the functor's names, read and written; null where `has` lacks it
  float* step;  // one element: steps taken; plus one by a step that is not skipped. Null: steps are not counted
  int64_t numel;
  uint32_t has;         // bit i: there is state i
  int32_t group;        // whose hyperparameters
  int32_t chunk_elems;  // a multiple of 16 bytes
  int32_t chunks;
  uint32_t chunks_done;  // scratch of the kernel, zero between launches
  uint32_t unused;
};
static_assert(sizeof(OptimTensor) == 80);

constexpr int kOptimMaxValues = 6;

struct OptimGroup {
  const void*
      lr_device;  // one float (double if lr_is_double) on the tensors' device, read by the kernel; null: lr counts
  double lr;
  const double* values_device;     // as many on the tensors' device, read by the kernel; null: values count
  double values[kOptimMaxValues];  // hyperparameters in the order of the functor's names
  bool lr_is_double, maximize;
};

constexpr int kOptimMaxGroups = 32;  // by value in the launch: a new learning rate costs no copy

// One step of an optimizer: its formula (kernels/optim/optimizers.h) with t = step + 1 and g = grad / grad_scale
// (negated by maximize) for every tensor whose gradient is not null; then step <- t. Nothing at all changes where
// found_inf is not zero. Gradients are only read.
struct OptimParams {
  OptimTensor* tensors;     // [tensor_count]
  const ListChunk* chunks;  // [chunk_count]
  // [tensor_count], addresses; null: this tensor has no gradient in this step. Where mixed_grads says so, and on the
  // CPU, entries of gradient.h.
  const void* const* grads;
  const float* grad_scale;  // one element, or null
  const float* found_inf;   // one element, or null
  int64_t tensor_count, chunk_count;
  int32_t first_group, group_count;  // tensors of other groups are left alone
  Optimizer optimizer;
  Storage storage;
  bool mixed_grads;  // some gradient may be float32, float16 or bfloat16 beside a parameter of another one of these
  uint32_t most;     // bits of all tensors' `has` together
  OptimGroup groups[kOptimMaxGroups];
  uint64_t seeds[kOptimMaxGroups];  // of the groups; bfloat16_stochastic reads them
  const OptimBeside* beside;        // [tensor_count], or null; not for 8-bit storages on CUDA, nor for layerwise ones
  double ema_weight;                // of its averages, from 0 to 1; a tensor without gradient has one too
  bool zero_grads;  // gradients become 0 once they are read, in a skipped step too; with the same limits
};

// Whether the step does more than update parameters and states.
WARPSMITH_HOST_DEVICE bool does_more(const OptimParams& p) { return p.beside || p.zero_grads; }

Status optim_cuda(const OptimParams& params, void* stream);
Status optim_any_cuda(const OptimParams& params, void* stream);  // also with mixed_grads, beside and zero_grads
Status optim_cpu(const OptimParams& params, const Parallel& parallel);

// Writes words of a table or of a column of addresses; `host` is free again when the call returns, which waits for
// nothing.
Status optim_upload_cuda(const int64_t* host, int64_t* device, int64_t words, void* stream);

// Elements of a chunk for tensors of these sizes in all. The CUDA answer depends on the current device.
Status optim_chunk_elems_cuda(int64_t total_elems, Storage storage, int32_t* chunk_elems);
int32_t optim_chunk_elems_cpu();

// base^exponent for a whole exponent >= 0 by squaring: a relative error below 1e-14, and the same bits on every
// machine.
WARPSMITH_HOST_DEVICE double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// 1 - base^t in the step after `taken` steps.
WARPSMITH_HOST_DEVICE double bias_correction(double base, float taken) {
  return 1 - power(base, static_cast<int64_t>(taken) + 1);
}

WARPSMITH_HOST_DEVICE const double* values_of(const OptimGroup& group) {
  return group.values_device ? group.values_device : group.values;
}

// What all elements of a tensor share. `corrections`: bias_correction of the first F::kPowers values.
template <class F, class T>
WARPSMITH_HOST_DEVICE typename F::template Scalars<T> optim_scalars(const OptimGroup& group, const float* grad_scale,
                                                                    const double* corrections, double step) {
  double lr = group.lr;
  if (group.lr_device)
    lr =
        group.lr_is_double ? *static_cast<const double*>(group.lr_device) : *static_cast<const float*>(group.lr_device);
  const double factor = grad_scale ? 1.0 / static_cast<double>(*grad_scale) : 1.0;
  return F::template scalars<T>({values_of(group), corrections, lr, group.maximize ? -factor : factor, step});
}

}  // namespace warpsmith
