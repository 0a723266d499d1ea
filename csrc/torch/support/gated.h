#pragma once
#include "kernels/activation/gated.h"
#include "torch/support/device.h"
#include "torch/support/rows.h"
#include "torch/support/tensor.h"

// The binding of the gated activations: checks, rows, allocation, launch. Op: the op's names, kForward and kBackward,
// and its launchers, as static functions cuda(params, stream) and cpu(params, threads) for both params.
namespace warpsmith {

// gate and up as rows of `columns`; without up, gate holds both, one after the other in each row.
struct GatedRows {
  Rows gate;
  std::optional<Rows> up_rows;
  const void* up = nullptr;
  int64_t columns = 0, up_stride = 0;
  Dtype dtype = Dtype::float32;
};

inline GatedRows gated_rows(const char* op, const Tensor& gate, const std::optional<Tensor>& up) {
  GatedRows r;
  r.dtype = float_dtype(op, "gate", gate);
  if (up) {
    check_dtype(op, "up", *up, r.dtype);
    check_same_shape(op, "up", *up, gate);
    check_same_device(op, "up", *up, gate);
  }
  r.gate = as_rows(op, "gate", gate);
  r.columns = r.gate.columns;
  if (up) {
    r.up_rows = as_rows(op, "up", *up);
    r.up = r.up_rows->tensor.const_data_ptr();
    r.up_stride = r.up_rows->stride;
    return r;
  }
  if (r.columns % 2) refuse(op, "gate", "an even last dimension when there is no up", "shape " + shape_text(gate));
  r.columns /= 2;
  r.up = static_cast<const char*>(r.gate.tensor.const_data_ptr()) + r.columns * size_bytes(r.dtype);
  r.up_stride = r.gate.stride;
  return r;
}

// The shape of y.
inline std::vector<int64_t> gated_shape(const Tensor& gate, int64_t columns) {
  std::vector<int64_t> shape(static_cast<size_t>(gate.dim()));
  for (size_t i = 0; i + 1 < shape.size(); ++i) shape[i] = gate.size(static_cast<int64_t>(i));
  shape.back() = columns;
  return shape;
}

template <class Op> Tensor gated_forward(const Tensor& gate, const std::optional<Tensor>& up, bool tanh) {
  const GatedRows r = gated_rows(Op::kForward, gate, up);
  const std::vector<int64_t> shape = gated_shape(gate, r.columns);
  Tensor y = allocate(Op::kForward, "y", shape.data(), gate.dim(), dtype_code(gate), gate);
  if (r.gate.rows == 0 || r.columns == 0) return y;
  const GatedFwdParams p{r.gate.tensor.const_data_ptr(),
                         r.up,
                         y.mutable_data_ptr(),
                         r.gate.rows,
                         r.columns,
                         r.gate.stride,
                         r.up_stride,
                         tanh,
                         r.dtype};
  run_on(
      Op::kForward, gate, [&](void* stream) { return Op::cuda(p, stream); },
      [&](const Parallel& threads) { return Op::cpu(p, threads); });
  return y;
}

// Where a gradient goes; no pointer: it is not wanted.
struct GatedTarget {
  void* data = nullptr;
  int64_t stride = 0;
};

template <class Op> void gated_gradients(const Tensor& dy_any, const Tensor& gate, const GatedRows& r,
                                         GatedTarget dgate, GatedTarget dup, bool tanh) {
  const Rows dy = as_rows(Op::kBackward, "dy", dy_any);
  if (r.gate.rows == 0 || r.columns == 0 || (!dgate.data && !dup.data)) return;
  const GatedBwdParams p{dy.tensor.const_data_ptr(),
                         r.gate.tensor.const_data_ptr(),
                         r.up,
                         dgate.data,
                         dup.data,
                         r.gate.rows,
                         r.columns,
                         dy.stride,
                         r.gate.stride,
                         r.up_stride,
                         dgate.data ? dgate.stride : r.columns,
                         dup.data ? dup.stride : r.columns,
                         tanh,
                         r.dtype};
  run_on(
      Op::kBackward, gate, [&](void* stream) { return Op::cuda(p, stream); },
      [&](const Parallel& threads) { return Op::cpu(p, threads); });
}

template <class Op>
GatedRows gated_backward_rows(const Tensor& dy, const Tensor& gate, const std::optional<Tensor>& up) {
  const GatedRows r = gated_rows(Op::kBackward, gate, up);
  check_dtype(Op::kBackward, "dy", dy, r.dtype);
  const std::vector<int64_t> shape = gated_shape(gate, r.columns);
  bool same = dy.dim() == gate.dim();
  for (size_t i = 0; same && i < shape.size(); ++i) same = dy.size(static_cast<int64_t>(i)) == shape[i];
  if (!same) {
    std::string text;
    for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    refuse(Op::kBackward, "dy", "shape (" + text + ")", shape_text(dy));
  }
  check_same_device(Op::kBackward, "dy", dy, gate);
  return r;
}

inline void* elements_behind(void* base, int64_t elements, Dtype dtype) {
  return static_cast<char*>(base) + elements * size_bytes(dtype);
}

// {dgate, dup}; what is not wanted has no elements. Without up, dgate is the gradient of both, packed as gate is, and
// dup has no elements.
template <class Op> std::tuple<Tensor, Tensor> gated_backward(const Tensor& dy, const Tensor& gate,
                                                              const std::optional<Tensor>& up, bool tanh,
                                                              bool want_dgate, bool want_dup) {
  const GatedRows r = gated_backward_rows<Op>(dy, gate, up);
  const Tensor none = allocate_vector(Op::kBackward, "no gradient", 0, dtype_code(gate), gate);
  Tensor dgate = want_dgate ? allocate_like(Op::kBackward, "dgate", gate) : none;
  Tensor dup = up && want_dup ? allocate_like(Op::kBackward, "dup", *up) : none;
  GatedTarget to_dgate, to_dup;
  if (want_dgate) to_dgate = {dgate.mutable_data_ptr(), up ? r.columns : 2 * r.columns};
  if (!up && want_dgate) to_dup = {elements_behind(to_dgate.data, r.columns, r.dtype), 2 * r.columns};
  if (up && want_dup) to_dup = {dup.mutable_data_ptr(), r.columns};
  gated_gradients<Op>(dy, gate, r, to_dgate, to_dup, tanh);
  return {dgate, dup};
}

// The same, over gate and up themselves, which must be contiguous; that they lie apart is for the caller to see to.
template <class Op> void gated_backward_inplace(const Tensor& dy, Tensor& gate, std::optional<Tensor>& up, bool tanh,
                                                bool want_dgate, bool want_dup) {
  const GatedRows r = gated_backward_rows<Op>(dy, gate, up);
  const auto check_contiguous = [&](const char* argument, const Tensor& t, const Rows& rows) {
    if (rows.stride != rows.columns || rows.tensor.const_data_ptr() != t.const_data_ptr())
      refuse(Op::kBackward, argument, "a contiguous tensor to overwrite", "gaps or another order");
  };
  check_contiguous("gate", gate, r.gate);
  if (up) check_contiguous("up", *up, *r.up_rows);
  GatedTarget to_dgate, to_dup;
  if (want_dgate) to_dgate = {gate.mutable_data_ptr(), r.gate.stride};
  if (!up && want_dgate) to_dup = {elements_behind(to_dgate.data, r.columns, r.dtype), r.gate.stride};
  if (up && want_dup) to_dup = {up->mutable_data_ptr(), r.up_stride};
  gated_gradients<Op>(dy, gate, r, to_dgate, to_dup, tanh);
}

}  // namespace warpsmith
