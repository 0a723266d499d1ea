#include <pybind11/pybind11.h>

#include <cstdint>

#include "pymodule/bindings.h"
#include "pymodule/dlpack.h"

// The questions that `linear` asks of its tensors at every call. DLPack answers most of them by one C call a tensor,
// 0.2 us for all where Python's look-ups by name take 0.8: a quarter of what a small layer costs the host.
namespace py = pybind11;

namespace warpsmith::host {
namespace {

bool is_true(PyObject* found) {
  if (!found) throw py::error_already_set();
  Py_DECREF(found);  // True and False have other owners
  return found == Py_True;
}

// Tensors of some types alone, in which nobody has put other attributes in the place of torch's.
class Tensors {
 public:
  Tensors(const py::capsule& exchange_api, py::tuple types)
      : api_(dlpack::find(exchange_api)), types_(std::move(types)), is_neg_(types_[0].attr("is_neg")) {
    const py::object attribute = types_[0].attr("requires_grad");
    for (const auto& type : types_)
      if (!Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type) || !attribute.is(type.attr("requires_grad")))
        throw py::value_error("types: expected tensors whose requires_grad is one attribute in C");
    requires_grad_ = reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset;
  }

  bool read(PyObject* t, dlpack::Tensor* out) const {
    bool known = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types_.ptr()); ++i)
      known = known || PyTuple_GET_ITEM(types_.ptr(), i) == reinterpret_cast<PyObject*>(Py_TYPE(t));
    if (!known) return false;
    if (api_.tensor_from_object(t, out) == 0) return true;
    PyErr_Clear();  // sparse, or without memory
    return false;
  }

  bool trains(PyObject* t) const { return is_true(requires_grad_->get(t, requires_grad_->closure)); }
  // Whether a tensor requires no gradient and holds its values, not their negatives.
  bool is_plain_place(PyObject* t) const { return !trains(t) && !is_true(PyObject_CallOneArg(is_neg_.ptr(), t)); }

 private:
  const dlpack::ExchangeApi& api_;
  py::tuple types_;
  py::object is_neg_;
  const PyGetSetDef* requires_grad_;
};

bool is_contiguous(const dlpack::Tensor& t) {
  int64_t stride = 1;
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != stride) return false;
    stride *= t.shape[i];
  }
  return true;
}

struct Bytes {
  uintptr_t first, end;  // equal, where there are none
};

Bytes bytes_of(const dlpack::Tensor& t) {
  uintptr_t elements = 1;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return {};
    elements += static_cast<uintptr_t>((t.shape[i] - 1) * t.strides[i]);
  }
  const uintptr_t first = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
  return {first, first + elements * t.dtype.bits / 8};
}

bool share_bytes(const dlpack::Tensor& a, const dlpack::Tensor& b) {
  const Bytes of_a = bytes_of(a), of_b = bytes_of(b);
  return of_a.first < of_b.end && of_b.first < of_a.end;
}

// Whether a main_grad has the dtype, device, shape and strides for sums of a weight's gradients.
bool takes_sums(const dlpack::Tensor& to, const dlpack::Tensor& weight) {
  const uint8_t bits = weight.dtype.bits == 64 ? 64 : 32;
  if (!(to.dtype == dlpack::DataType{dlpack::kFloat, bits, 1}) || !(to.device == weight.device)) return false;
  if (to.ndim != 2 || weight.ndim != 2) return false;
  if (to.shape[0] != weight.shape[0] || to.shape[1] != weight.shape[1]) return false;
  int64_t shape[] = {to.shape[1], to.shape[0]}, strides[] = {to.strides[1], to.strides[0]};
  dlpack::Tensor transposed = to;
  transposed.shape = shape;
  transposed.strides = strides;
  return is_contiguous(to) || is_contiguous(transposed);
}

class MainGrads {
 public:
  static constexpr Py_ssize_t kLeast = 2;
  static constexpr const char* kExpected = "place_of: expected main_grad, weight, and what else is read";

  explicit MainGrads(Tensors tensors) : tensors_(std::move(tensors)) {}

  PyObject* answer(PyObject* const* given, Py_ssize_t count) const {
    constexpr long kFits = -1, kUnknown = -2;
    dlpack::Tensor to, other;
    if (!tensors_.read(given[0], &to)) return PyLong_FromLong(kUnknown);
    bool fits = tensors_.is_plain_place(given[0]);
    for (Py_ssize_t i = 1; i < count; ++i) {
      if (given[i] == Py_None) continue;
      const bool known = tensors_.read(given[i], &other);
      if (known && share_bytes(to, other)) return PyLong_FromSsize_t(i - 1);
      fits = fits && known && (i > 1 || takes_sums(to, other));
    }
    return PyLong_FromLong(fits ? kFits : kUnknown);
  }

 private:
  Tensors tensors_;
};

class PlainLayers {
 public:
  static constexpr Py_ssize_t kLeast = 3;
  static constexpr const char* kExpected = "is_plain_layer: expected x, weight, bias, and main_grad if there is one";

  PlainLayers(Tensors tensors, py::tuple modes, double most)
      : tensors_(std::move(tensors)), modes_(std::move(modes)), most_(most) {}

  PyObject* answer(PyObject* const* given, Py_ssize_t count) const {
    const bool biased = given[2] != Py_None;
    dlpack::Tensor x, weight, bias;
    if (!tensors_.read(given[0], &x) || !tensors_.read(given[1], &weight)) return Py_NewRef(Py_False);
    if (biased && !tensors_.read(given[2], &bias)) return Py_NewRef(Py_False);
    if (weight.ndim != 2 || x.ndim < 2 || !is_narrow(x.dtype) || !is_contiguous(x)) return Py_NewRef(Py_False);
    if (biased && (!(bias.dtype == x.dtype) || bias.ndim != 1 || bias.shape[0] == 1)) return Py_NewRef(Py_False);
    double products = static_cast<double>(weight.shape[0]);
    for (int32_t i = 0; i < x.ndim; ++i) products *= static_cast<double>(x.shape[i]);
    const bool large = products >= most_, trains = tensors_.trains(given[1]);
    if (count == kLeast) {
      if (large) return Py_NewRef(Py_None);
      const bool either = trains || (biased && tensors_.trains(given[2]));
      return Py_NewRef(either && is_on(0) ? Py_None : Py_True);
    }
    dlpack::Tensor to;
    if (large || !trains || !tensors_.read(given[3], &to) || !tensors_.is_plain_place(given[3]))
      return Py_NewRef(Py_False);
    const bool apart = !share_bytes(to, weight) && !share_bytes(to, x) && !(biased && share_bytes(to, bias));
    return PyBool_FromLong(apart && takes_sums(to, weight) && is_plain_mode());
  }

 private:
  // float32, float16 or bfloat16
  static bool is_narrow(dlpack::DataType dtype) {
    return dtype.lanes == 1 && ((dtype.code == dlpack::kFloat && (dtype.bits == 32 || dtype.bits == 16)) ||
                                (dtype.code == dlpack::kBfloat && dtype.bits == 16));
  }

  bool is_on(size_t mode) const { return is_true(PyObject_CallNoArgs(PyTuple_GET_ITEM(modes_.ptr(), mode))); }
  bool is_plain_mode() const {
    bool plain = is_on(0);
    for (size_t i = 1; i < modes_.size(); ++i) plain = plain && !is_on(i);
    return plain;
  }

  Tensors tensors_;
  py::tuple modes_;
  double most_;
};

template <class Asked> PyObject* ask(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count < Asked::kLeast) {
    PyErr_SetString(PyExc_TypeError, Asked::kExpected);
    return nullptr;
  }
  try {
    return static_cast<const Asked*>(PyCapsule_GetPointer(self, nullptr))->answer(given, count);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

// A function of C itself: pybind11's dispatch takes as long as the answer.
template <class Asked> py::object function_of(Asked asked) {
  const py::capsule self(new Asked(std::move(asked)), [](void* p) { delete static_cast<Asked*>(p); });
  static PyMethodDef definition{"ask", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&ask<Asked>)),
                                METH_FASTCALL, Asked::kExpected};
  PyObject* made = PyCFunction_New(&definition, self.ptr());
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

const RegisterBinder registered([](py::module_& m) {
  m.def(
      "plain_layers",
      [](const py::capsule& exchange_api, const py::tuple& types, const py::tuple& modes, double most) {
        return function_of(PlainLayers(Tensors(exchange_api, types), modes, most));
      },
      py::arg("exchange_api"), py::arg("types"), py::arg("modes"), py::arg("most"),
      "A function of x, weight and bias or None. True: they are of these types, x is contiguous float32, float16 or "
      "bfloat16, bias has its dtype, and their dimensions are those of a layer. None: so they are, but the layer "
      "multiplies `most` times, or a parameter gets a gradient. Else False. With a main_grad behind them: whether so "
      "they are, fewer are multiplied, the weight gets a gradient and main_grad can take it, and of `modes` the first, "
      "is_grad_enabled, is on and the others are off.");
  m.def(
      "main_grads",
      [](const py::capsule& exchange_api, const py::tuple& types) {
        return function_of(MainGrads(Tensors(exchange_api, types)));
      },
      py::arg("exchange_api"), py::arg("types"),
      "A function of a main_grad, its weight and other tensors or None: the number, from 0 for the weight, of the "
      "first that shares bytes with main_grad. If none does: -1 where all are of these types and main_grad can take "
      "the weight's gradient, else -2.");
});

}  // namespace
}  // namespace warpsmith::host
