#pragma once
#include <cstdint>
#include <iterator>

#include "common/dtype.h"
#include "common/float8_scale.h"
#include "common/host_device.h"
#include "common/parallel.h"
#include "common/status.h"
#include "common/tensor_list.h"
#include "kernels/optim/gradient.h"
#include "kernels/optim/optim_ops.h"
#include "kernels/optim/optimizers.h"
#include "kernels/optim/quantize.h"
#include "kernels/optim/refine.h"
#include "kernels/optim/step_extras.h"

namespace warpsmith {

// The dtypes of a table's arrays. Arithmetic is in float32, for float64 arrays in float64. A 16-bit array is rounded
// once per step, to nearest unless its enumerator names another rounding.
enum class Storage : uint8_t {
  float32,               // all arrays
  float64,               // all arrays; CPU only
  bfloat16,              // all arrays, as torch.optim stores them for a bfloat16 model
  float16,               // all arrays
  bfloat16_master,       // parameters and gradients in bfloat16; states and masters in float32
  float16_master,        // parameters and gradients in float16; states and masters in float32
  bfloat16_states,       // states in bfloat16; parameters and gradients in float32
  bfloat16_stochastic,   // all arrays; parameters and states are rounded up or down at random
  bfloat16_compensated,  // all arrays, and one more that holds the rounding errors of the parameters
  bfloat16_remainder,    // parameters and gradients; 16 more bits complete a parameter to a float32; states in float32
  float32_8bit,          // parameters and gradients in float32; states are 8-bit codes with float32 scales, or float32
  bfloat16_8bit,         // the same with bfloat16 parameters and gradients
  float16_8bit,          // the same with float16 parameters and gradients
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
// Bit i: 8-bit storages may hold state i of the optimizer as codes. 0: 8-bit storages refuse the optimizer.
constexpr uint32_t states_of_8bit(Optimizer optimizer) {
  switch (optimizer) {
    case Optimizer::adamw:
    case Optimizer::adam: return 0b011;
    case Optimizer::sgd:
    case Optimizer::lion: return 0b1;
    default: return 0;
  }
}
// Whether a step may write 8-bit floats of weights (OptimParams::casts): kernels are compiled for these alone, without
// amsgrad.
constexpr bool casts_weights(Storage s) {
  return s == Storage::float32 || s == Storage::bfloat16 || s == Storage::bfloat16_master ||
         s == Storage::bfloat16_remainder;
}
constexpr bool casts_weights(Optimizer optimizer, Storage s) {
  return optimizer == Optimizer::adamw && casts_weights(s);
}
constexpr bool has_master(Storage s) { return s == Storage::bfloat16_master || s == Storage::float16_master; }

// How a bfloat16 parameter keeps what rounding to nearest would lose.
enum class Refinement : uint8_t {
  none,
  stochastic,   // rounds parameter and states up or down at random, so that the mean of the rounding error is 0
  compensated,  // keeps the rounding error in bfloat16: the parameter's value is the sum of both
  remainder,    // keeps the rounding error exactly, in 16 bits: both arrays together are the float32 value
};
constexpr Refinement refinement_of(Storage s) {
  switch (s) {
    case Storage::bfloat16_stochastic: return Refinement::stochastic;
    case Storage::bfloat16_compensated: return Refinement::compensated;
    case Storage::bfloat16_remainder: return Refinement::remainder;
    default: return Refinement::none;
  }
}
// Whether the refinement keeps the rounding errors of the parameters in an array, 16 bits per element.
constexpr bool keeps_dropped(Refinement r) { return r == Refinement::compensated || r == Refinement::remainder; }
constexpr bool has_extra(Storage s) { return has_master(s) || keeps_dropped(refinement_of(s)); }
// The dtype of the states. For 8-bit storages: of the states that are not codes.
constexpr Dtype state_dtype(Storage s) {
  if (s == Storage::bfloat16_states) return Dtype::bfloat16;
  return has_master(s) || is_8bit(s) || s == Storage::bfloat16_remainder ? Dtype::float32 : param_dtype(s);
}

// One tensor of the table. All its arrays have numel elements in the same memory order, in the dtypes of the storage.
struct OptimTensor {
  void* param;  // read and written; with a master only written
  union {
    // Read and written. What it is depends on the storage:
    //   *_master              the float32 masters: the parameters before rounding
    //   bfloat16_compensated  the bfloat16 rounding errors
    //   bfloat16_remainder    the int16 remainders
    //   *_8bit                the float32 scales, [states, quant_blocks(numel)]; null: this tensor's states are float32
    //   others                null
    void* extra;
    uint64_t first_elem;  // bfloat16_stochastic: index of the first element among the elements of all tensors
  };
  void* states[kOptimMaxStates];  // in the order of the functor's names, read and written; null where `has` lacks the
                                  // state
  float* step;  // one element: steps taken, without skipped ones; read and written. Null: steps are not counted
  int64_t numel;
  uint32_t has;         // bit i: the tensor has state i
  int32_t group;        // index of the group with its hyperparameters
  int32_t chunk_elems;  // a multiple of 16 bytes
  int32_t chunks;
  uint32_t chunks_done;  // scratch of the kernel, zero between launches
  int32_t row_elems;     // the rows of a contiguous matrix that the step may cast, and chunks hold whole; 0: another
};
static_assert(sizeof(OptimTensor) == 80);

constexpr int kOptimMaxValues = 6;

struct OptimGroup {
  const void*
      lr_device;  // one float (double if lr_is_double) on the tensors' device, read by the kernel; null: `lr` is used
  double lr;
  const double* values_device;     // the same on the tensors' device, read by the kernel; null: `values` is used
  double values[kOptimMaxValues];  // hyperparameters in the order of the functor's names
  bool lr_is_double, maximize;
};

constexpr int kOptimMaxGroups = 32;  // passed by value in the launch: a new learning rate costs no copy

// One step of an optimizer. It applies the formula of kernels/optim/optimizers.h to every tensor with a gradient, with
// t = step + 1 and g = grad / grad_scale (negated by maximize); then step <- t. If found_inf is not zero, the step is
// skipped and writes nothing except the zeros of zero_grads.
struct OptimParams {
  OptimTensor* tensors;     // [tensor_count]
  const ListChunk* chunks;  // [chunk_count]
  // [tensor_count], addresses; null: the tensor has no gradient in this step. With mixed_grads, and always on the CPU,
  // an entry may also hold a dtype (gradient.h).
  const void* const* grads;
  const float* grad_scale;  // one element, or null
  const float* found_inf;   // one element, or null
  int64_t tensor_count, chunk_count;
  int32_t first_group, group_count;  // the step leaves tensors of other groups alone
  Optimizer optimizer;
  Storage storage;
  bool mixed_grads;  // a gradient may differ from its parameter in dtype: float32, float16 or bfloat16
  uint32_t most;     // the bits that any tensor has in `has`
  OptimGroup groups[kOptimMaxGroups];
  uint64_t seeds[kOptimMaxGroups];  // one per group; only bfloat16_stochastic reads them
  const StepExtras* extras;         // [tensor_count], or null. Not for 8-bit storages on CUDA or layerwise optimizers
  const Float8Rows* casts;          // [tensor_count], or null. Of a tensor with row_elems: where its bytes are written
  double ema_weight;                // weight of the averages, from 0 to 1; those of tensors without gradient move too
  bool zero_grads;  // sets gradients to 0 after reading them, also in a skipped step. Same limits as `extras`
};

// Whether the step does more than update parameters and states.
WARPSMITH_HOST_DEVICE bool does_more(const OptimParams& p) { return p.extras || p.zero_grads; }

Status optim_cuda(const OptimParams& params, void* stream);
Status optim_runtime_dtypes_cuda(const OptimParams& params,
                                 void* stream);  // also with mixed_grads, extras and zero_grads
Status optim_cpu(const OptimParams& params, const Parallel& parallel);

// Writes words of a table or of a column of addresses. Does not wait for the device. The caller may reuse `host` as
// soon as the call returns.
Status optim_upload_cuda(const int64_t* host, int64_t* device, int64_t words, void* stream);

// Elements per chunk for tensors that have total_elems elements together. The CUDA answer depends on the current
// device.
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

// Computes what all elements of a tensor share. `corrections`: bias_correction of the first F::kPowers values.
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
