#include "kernels/rope/rope.h"

#include "common/overlap.h"
#include "torch/support/device.h"
#include "torch/support/library.h"
#include "torch/support/rotary.h"
#include "torch/support/tensor.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "rope";

using OptionalTensor = std::optional<Tensor>;

void run(const RotaryInputs& in, const HeadsView& q, const HeadsView& k, const HeadsView& q_out, const HeadsView& k_out,
         bool inplace) {
  const RopeParams p{q.tensor.const_data_ptr(),
                     k.tensor.const_data_ptr(),
                     q_out.tensor.mutable_data_ptr(),
                     k_out.tensor.mutable_data_ptr(),
                     q.layout,
                     k.layout,
                     q_out.layout,
                     k_out.layout,
                     in.angles,
                     in.positions,
                     in.shape,
                     inplace,
                     in.dtype};
  run_on(
      kOp, q.tensor, [&](void* stream) { return rope_cuda(p, stream); },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(rotary_check_positions_cpu(in.shape, in.angles, in.positions));
        return rope_cpu(p, threads);
      });
}

std::tuple<Tensor, Tensor> forward(Tensor q_any, Tensor k_any, Tensor cos, Tensor sin, bool interleaved,
                                   OptionalTensor cu_seqlens, OptionalTensor offsets, int64_t position_offset,
                                   bool inverse) {
  const RotaryInputs in =
      rotary_inputs(kOp, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse);
  const HeadsView q = as_heads(kOp, "q", q_any), k = as_heads(kOp, "k", k_any);
  const HeadsView q_out = allocate_heads(kOp, "q", q_any), k_out = allocate_heads(kOp, "k", k_any);
  if (!in.empty(q_any, k_any)) run(in, q, k, q_out, k_out, /*inplace=*/false);
  return {q_out.tensor, k_out.tensor};
}

StridedElements elements_of(const Tensor& t) {
  StridedElements found{t.const_data_ptr(), {}, {}, static_cast<int64_t>(t.element_size())};
  for (int64_t i = 0; i < t.dim(); ++i) {
    found.sizes.push_back(t.size(i));
    found.strides.push_back(t.stride(i));
  }
  return found;
}

void check_writable(const char* argument, const Tensor& t) {
  if (t.numel() == 0) return;  // torch gives these strides of 0
  const int64_t dim = t.dim();
  if (t.size(dim - 1) > 1 && t.stride(dim - 1) != 1)
    refuse(kOp, argument, "adjacent elements in the last dimension to be written in place",
           "stride " + std::to_string(t.stride(dim - 1)));
  for (int64_t i = 0; i < dim; ++i)
    if (t.size(i) > 1 && t.stride(i) == 0)
      refuse(kOp, argument, "elements of their own to be written in place", "an expanded tensor");
  if (overlaps_itself(elements_of(t)))
    refuse(kOp, argument, "elements of their own to be written in place", "strides by which they overlap");
}

void inplace(Tensor q_any, Tensor k_any, Tensor cos, Tensor sin, bool interleaved, OptionalTensor cu_seqlens,
             OptionalTensor offsets, int64_t position_offset, bool inverse) {
  const RotaryInputs in =
      rotary_inputs(kOp, q_any, k_any, cos, sin, interleaved, cu_seqlens, offsets, position_offset, inverse);
  check_writable("q", q_any);
  check_writable("k", k_any);
  if (q_any.numel() > 0 && k_any.numel() > 0 && overlap(elements_of(q_any), elements_of(k_any)))
    refuse(kOp, "k", "other memory than that of q to be written in place", "elements that are q's as well");
  const HeadsView q = as_heads(kOp, "q", q_any), k = as_heads(kOp, "k", k_any);
  if (!in.empty(q_any, k_any) && in.shape.rotary_dim > 0) run(in, q, k, q, k, /*inplace=*/true);
}

#define WARPSMITH_ROPE_ARGUMENTS                                                                            \
  "Tensor cos, Tensor sin, bool interleaved, Tensor? cu_seqlens, Tensor? offsets, SymInt position_offset, " \
  "bool inverse"

WARPSMITH_SCHEMAS(m) {
  m.def("rope(Tensor q, Tensor k, " WARPSMITH_ROPE_ARGUMENTS ") -> (Tensor q_out, Tensor k_out)");
  m.def("rope_forward(Tensor q, Tensor k, " WARPSMITH_ROPE_ARGUMENTS ") -> (Tensor q_out, Tensor k_out)");
  m.def("rope_inplace(Tensor(a!) q, Tensor(b!) k, " WARPSMITH_ROPE_ARGUMENTS ") -> ()");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("rope", TORCH_BOX(&forward));
  m.impl("rope_forward", TORCH_BOX(&forward));
  m.impl("rope_inplace", TORCH_BOX(&inplace));
}

}  // namespace
}  // namespace warpsmith
