#include <vector>

#include "bindings/support/device.h"
#include "bindings/support/flag.h"
#include "bindings/support/library.h"
#include "bindings/support/quantize.h"
#include "bindings/support/rows.h"
#include "bindings/support/tensor.h"
#include "kernels/activation/activation.h"

namespace warpsmith {
namespace {

// The binding of the gated activations: checks, rows, allocation, launch.

// gate and up as rows of `columns`. Without up, each row of gate holds both, one after the other.
struct GatedRows {
  Rows gate;
  std::optional<Rows> up_rows;
  const void* up = nullptr;
  int64_t columns = 0, up_stride = 0;
  Dtype dtype = Dtype::float32;
};

GatedRows gated_rows(const char* op, const Tensor& gate, const std::optional<Tensor>& up) {
  GatedRows r;
  r.dtype = float_dtype(op, "gate", gate);
  if (up) check_like(op, "up", *up, gate, r.dtype);
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
std::vector<int64_t> gated_shape(const Tensor& gate, int64_t columns) {
  std::vector<int64_t> shape(static_cast<size_t>(gate.dim()));
  for (size_t i = 0; i + 1 < shape.size(); ++i) shape[i] = gate.size(static_cast<int64_t>(i));
  shape.back() = columns;
  return shape;
}

// cast: filled with that of y; null: not wanted.
Tensor gated_forward(Gated op, const Tensor& gate, const std::optional<Tensor>& up, bool tanh,
                     std::optional<RowsCast>* cast = nullptr) {
  if (cast) narrow_dtype(name(op), "gate", gate);
  const GatedRows r = gated_rows(name(op), gate, up);
  const std::vector<int64_t> shape = gated_shape(gate, r.columns);
  Tensor y = allocate(name(op), "y", shape.data(), gate.dim(), dtype_code(gate), gate);
  if (cast) *cast = new_rows_cast(name(op), y, r.dtype, r.gate.rows, r.columns);
  if (r.gate.rows == 0 || r.columns == 0) return y;
  const GatedFwdParams p{r.gate.tensor.const_data_ptr(),
                         r.up,
                         y.mutable_data_ptr(),
                         r.gate.rows,
                         r.columns,
                         r.gate.stride,
                         r.up_stride,
                         tanh,
                         r.dtype,
                         cast ? (*cast)->to : Float8Rows{}};
  run_on(
      name(op), gate,
      [&](void* stream) {
        bool has_cast = false;
        WARPSMITH_RETURN_IF_FAILED(gated_forward_cuda(op, p, stream, &has_cast));
        return has_cast || !cast ? Status() : quantize_cuda((*cast)->behind, stream);
      },
      [&](const Parallel& threads) {
        WARPSMITH_RETURN_IF_FAILED(gated_forward_cpu(op, p, threads));
        return cast ? quantize_cpu((*cast)->behind, threads) : Status();
      });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> swiglu_fp8(Tensor gate, std::optional<Tensor> up, bool) {
  std::optional<RowsCast> cast;
  const Tensor y = gated_forward(Gated::swiglu, gate, up, false, &cast);
  return {y, cast->data, cast->scale, cast->counts};
}

// Where a gradient is written; null: not wanted.
struct GatedTarget {
  void* data = nullptr;
  int64_t stride = 0;
};

// y: dy_any, if that is contiguous and what the forward gave is written over it.
void gated_gradients(Gated op, const Tensor& dy_any, const Tensor& gate, const GatedRows& r, GatedTarget dgate,
                     GatedTarget dup, bool tanh, void* y = nullptr) {
  const Rows dy = as_rows(backward_name(op), "dy", dy_any);
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
                         r.dtype,
                         y};
  run_on<gated_backward_cuda, gated_backward_cpu>(backward_name(op), gate, op, p);
}

GatedRows gated_backward_rows(Gated op, const Tensor& dy, const Tensor& gate, const std::optional<Tensor>& up) {
  const GatedRows r = gated_rows(backward_name(op), gate, up);
  check_dtype(backward_name(op), "dy", dy, r.dtype);
  const std::vector<int64_t> shape = gated_shape(gate, r.columns);
  bool same = dy.dim() == gate.dim();
  for (size_t i = 0; same && i < shape.size(); ++i) same = dy.size(static_cast<int64_t>(i)) == shape[i];
  if (!same) {
    std::string text;
    for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    refuse(backward_name(op), "dy", "shape (" + text + ")", shape_text(dy));
  }
  check_same_device(backward_name(op), "dy", dy, gate);
  return r;
}

void* elements_behind(void* base, int64_t elements, Dtype dtype) {
  return static_cast<char*>(base) + elements * size_bytes(dtype);
}

// Returns {dgate, dup}; a gradient that is not wanted has no elements. Without up, dgate is the gradient of both,
// packed as gate is, and dup has no elements.
std::tuple<Tensor, Tensor> gated_backward(Gated op, const Tensor& dy, const Tensor& gate,
                                          const std::optional<Tensor>& up, bool tanh, bool want_dgate, bool want_dup) {
  const GatedRows r = gated_backward_rows(op, dy, gate, up);
  const Tensor none = allocate_vector(backward_name(op), "no gradient", 0, dtype_code(gate), gate);
  Tensor dgate = want_dgate ? allocate_like(backward_name(op), "dgate", gate) : none;
  Tensor dup = up && want_dup ? allocate_like(backward_name(op), "dup", *up) : none;
  GatedTarget to_dgate, to_dup;
  if (want_dgate) to_dgate = {dgate.mutable_data_ptr(), up ? r.columns : 2 * r.columns};
  if (!up && want_dgate) to_dup = {elements_behind(to_dgate.data, r.columns, r.dtype), 2 * r.columns};
  if (up && want_dup) to_dup = {dup.mutable_data_ptr(), r.columns};
  gated_gradients(op, dy, gate, r, to_dgate, to_dup, tanh);
  return {dgate, dup};
}

void check_contiguous(Gated op, const char* argument, const Tensor& t, const Rows& rows) {
  if (t.numel() == 0) return;  // e.g. the chunk of an expert without tokens: its strides mean nothing
  if (rows.stride != rows.columns || rows.tensor.const_data_ptr() != t.const_data_ptr())
    refuse(backward_name(op), argument, "a contiguous tensor to overwrite", "gaps or another order");
}

// The same, written over gate and up, which must be contiguous. The caller makes sure that they do not overlap. y: the
// place of what the forward gave, in the order of a contiguous dy, or null.
void gated_backward_inplace(Gated op, const Tensor& dy, Tensor& gate, std::optional<Tensor>& up, bool tanh,
                            bool want_dgate, bool want_dup, void* y = nullptr) {
  const GatedRows r = gated_backward_rows(op, dy, gate, up);
  check_contiguous(op, "gate", gate, r.gate);
  if (up) check_contiguous(op, "up", *up, *r.up_rows);
  GatedTarget to_dgate, to_dup;
  if (want_dgate) to_dgate = {gate.mutable_data_ptr(), r.gate.stride};
  if (!up && want_dgate) to_dup = {elements_behind(to_dgate.data, r.columns, r.dtype), r.gate.stride};
  if (up && want_dup) to_dup = {up->mutable_data_ptr(), r.up_stride};
  gated_gradients(op, dy, gate, r, to_dgate, to_dup, tanh, y);
}

// Both gradients over gate and up, and what the forward gave over dy: all contiguous, none of them overlapping.
void gated_backward_with_output(Gated op, Tensor& dy, Tensor& gate, std::optional<Tensor>& up, bool tanh) {
  check_contiguous(op, "dy", dy, as_rows(backward_name(op), "dy", dy));
  gated_backward_inplace(op, dy, gate, up, tanh, true, true, dy.mutable_data_ptr());
}

// The kernels of one row, with the signatures of its schemas. Flag: bool, or nothing.
template <Gated op, class... Flag> struct Bound {
  // Only autograd uses inplace_backward.
  static Tensor forward(Tensor gate, std::optional<Tensor> up, bool, Flag... flag) {
    return gated_forward(op, gate, up, (false || ... || flag));
  }
  static std::tuple<Tensor, Tensor> backward(Tensor dy, Tensor gate, std::optional<Tensor> up, bool want_dgate,
                                             bool want_dup, Flag... flag) {
    return gated_backward(op, dy, gate, up, (false || ... || flag), want_dgate, want_dup);
  }
  static void backward_inplace(Tensor dy, Tensor gate, std::optional<Tensor> up, bool want_dgate, bool want_dup,
                               Flag... flag) {
    gated_backward_inplace(op, dy, gate, up, (false || ... || flag), want_dgate, want_dup);
  }
  static void backward_with_output(Tensor dy, Tensor gate, std::optional<Tensor> up, Flag... flag) {
    gated_backward_with_output(op, dy, gate, up, (false || ... || flag));
  }
};

// g++ 12 does not instantiate a function whose address only a template takes.
#define WARPSMITH_ROW(op, function, flag) template struct WARPSMITH_FLAG_ARGUMENT_##flag(Bound, Gated::op);
WARPSMITH_GATED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW

WARPSMITH_OPS(m) {
#define WARPSMITH_ROW(op, function, flag)                                                                 \
  {                                                                                                       \
    using Row = WARPSMITH_FLAG_ARGUMENT_##flag(Bound, Gated::op);                                         \
    const std::string more = WARPSMITH_FLAG_SCHEMA_##flag,                                                \
                      wants = ", bool want_dgate, bool want_dup" + more + ") -> ";                        \
    m.add_forward(#op, "(Tensor gate, Tensor? up, bool inplace_backward" + more + ") -> Tensor y",        \
                  TORCH_BOX(&Row::forward));                                                              \
    m.add(#op "_backward(Tensor dy, Tensor gate, Tensor? up" + wants + "(Tensor dgate, Tensor dup)",      \
          TORCH_BOX(&Row::backward));                                                                     \
    m.add(#op "_backward_(Tensor dy, Tensor(a!) gate, Tensor(b!)? up" + wants + "()",                     \
          TORCH_BOX(&Row::backward_inplace));                                                             \
    m.add(#op "_backward_with_output_(Tensor(a!) dy, Tensor(b!) gate, Tensor(c!)? up" + more + ") -> ()", \
          TORCH_BOX(&Row::backward_with_output));                                                         \
  }
  WARPSMITH_GATED_OPS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.add(
      "swiglu_fp8(Tensor gate, Tensor? up, bool inplace_backward) -> (Tensor y, Tensor data, Tensor scale, Tensor "
      "counts)",
      TORCH_BOX(&swiglu_fp8));
}

}  // namespace
}  // namespace warpsmith
