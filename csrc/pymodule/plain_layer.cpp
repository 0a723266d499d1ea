#include <pybind11/pybind11.h>

#include "pymodule/bindings.h"
#include "pymodule/dlpack.h"

// The questions that `linear` asks of its tensors at every call. DLPack answers most of them by one C call a tensor,
// 0.2 us for all where Python's look-ups by name take 0.8: a quarter of what a small layer costs the host.
namespace py = pybind11;

namespace warpsmith::host {
namespace {

class PlainLayers {
 public:
  PlainLayers(const py::capsule& exchange_api, py::tuple types, py::object is_grad_enabled, double most)
      : api_(dlpack::find(exchange_api)), types_(std::move(types)), grads_(std::move(is_grad_enabled)), most_(most) {
    const py::object attribute = types_[0].attr("requires_grad");
    for (const auto& type : types_)
      if (!Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type) || !attribute.is(type.attr("requires_grad")))
        throw py::value_error("plain_layers: types: expected tensors whose requires_grad is one attribute in C");
    requires_grad_ = reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset;
    if (!PyCFunction_Check(grads_.ptr()) || PyCFunction_GET_FLAGS(grads_.ptr()) != METH_NOARGS)
      throw py::value_error("plain_layers: is_grad_enabled: expected a function in C without arguments");
  }

  PyObject* answer(PyObject* x_any, PyObject* weight_any, PyObject* bias_any) const {
    const bool biased = bias_any != Py_None;
    dlpack::Tensor x, weight, bias;
    if (!read(x_any, &x) || !read(weight_any, &weight) || (biased && !read(bias_any, &bias))) return Py_False;
    if (weight.ndim != 2 || x.ndim < 2 || !is_narrow(x.dtype)) return Py_False;
    double elements = 1;
    int64_t stride = 1;
    for (int32_t i = x.ndim - 1; i >= 0; --i) {
      if (x.shape[i] != 1 && x.strides[i] != stride) return Py_False;
      stride *= x.shape[i];
      elements *= static_cast<double>(x.shape[i]);
    }
    if (biased && (!(bias.dtype == x.dtype) || bias.ndim != 1 || bias.shape[0] == 1)) return Py_False;
    if (elements * static_cast<double>(weight.shape[0]) >= most_) return Py_None;
    return (trains(weight_any) || (biased && trains(bias_any))) && makes_gradients() ? Py_None : Py_True;
  }

 private:
  bool read(PyObject* t, dlpack::Tensor* out) const {
    bool known = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types_.ptr()); ++i)
      known = known || PyTuple_GET_ITEM(types_.ptr(), i) == reinterpret_cast<PyObject*>(Py_TYPE(t));
    if (!known) return false;
    if (api_.tensor_from_object(t, out) == 0) return true;
    PyErr_Clear();  // sparse, or without memory
    return false;
  }

  // float32, float16 or bfloat16
  static bool is_narrow(dlpack::DataType dtype) {
    return dtype.lanes == 1 && ((dtype.code == dlpack::kFloat && (dtype.bits == 32 || dtype.bits == 16)) ||
                                (dtype.code == dlpack::kBfloat && dtype.bits == 16));
  }

  bool trains(PyObject* t) const { return is_true(requires_grad_->get(t, requires_grad_->closure)); }
  bool makes_gradients() const { return is_true(PyCFunction_GET_FUNCTION(grads_.ptr())(nullptr, nullptr)); }
  static bool is_true(PyObject* found) {
    if (!found) throw py::error_already_set();
    Py_DECREF(found);  // True and False have other owners
    return found == Py_True;
  }

  const dlpack::ExchangeApi& api_;
  py::tuple types_;
  py::object grads_;
  double most_;
  const PyGetSetDef* requires_grad_;
};

constexpr const char* kName = "warpsmith.PlainLayers";

PyObject* ask(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "is_plain_layer: expected x, weight and bias");
    return nullptr;
  }
  try {
    const auto* layers = static_cast<const PlainLayers*>(PyCapsule_GetPointer(self, kName));
    PyObject* found = layers->answer(arguments[0], arguments[1], arguments[2]);
    Py_INCREF(found);
    return found;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

// A function of C itself: pybind11's dispatch takes as long as the answer.
py::object plain_layers(const py::capsule& exchange_api, const py::tuple& types, const py::object& is_grad_enabled,
                        double most) {
  const py::capsule self(new PlainLayers(exchange_api, types, is_grad_enabled, most), kName, [](PyObject* capsule) {
    delete static_cast<PlainLayers*>(PyCapsule_GetPointer(capsule, kName));
  });
  static PyMethodDef definition{"is_plain_layer", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&ask)),
                                METH_FASTCALL, "is_plain_layer(x, weight, bias)"};
  PyObject* made = PyCFunction_New(&definition, self.ptr());
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

const RegisterBinder registered([](py::module_& m) {
  m.def("plain_layers", &plain_layers, py::arg("exchange_api"), py::arg("types"), py::arg("is_grad_enabled"),
        py::arg("most"),
        "A function of x, weight and bias or None. True: they are of these types, x is contiguous float32, float16 or "
        "bfloat16, bias has its dtype, and their dimensions are those of a layer. None: so they are, but the layer "
        "multiplies `most` times, or a parameter gets a gradient. Else False.");
});

}  // namespace
}  // namespace warpsmith::host
