#include <cstdint>

#include "host/bindings.h"

// The per-step bookkeeping of multi-tensor optimizers: whether thousands of tensors are still where they were. Each
// function is a loop over Python objects that calls torch's own methods, handed in, at about half the cost of the same
// loop in Python.
namespace py = pybind11;

namespace warpsmith::host {
namespace {

int64_t address_of(PyObject* tensor, const py::handle& data_ptr) {
  const py::object result = py::reinterpret_steal<py::object>(PyObject_Vectorcall(data_ptr.ptr(), &tensor, 1, nullptr));
  if (!result) throw py::error_already_set();
  const long long address = PyLong_AsLongLong(result.ptr());
  if (address == -1 && PyErr_Occurred()) throw py::error_already_set();
  return address;
}

bool same_tensors(const py::list& tensors, const py::list& known, const py::buffer& addresses_in,
                  const py::object& data_ptr) {
  const py::buffer_info info = addresses_in.request();
  if (info.itemsize != 8 || info.ndim != 1) throw py::value_error("same_tensors: addresses: expected 64-bit integers");
  const auto* addresses = static_cast<const int64_t*>(info.ptr);
  const auto count = static_cast<Py_ssize_t>(tensors.size());
  if (count != static_cast<Py_ssize_t>(known.size()) || count != info.size) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* t = PyList_GET_ITEM(tensors.ptr(), i);
    if (t != PyList_GET_ITEM(known.ptr(), i) || address_of(t, data_ptr) != addresses[i]) return false;
  }
  return true;
}

PyObject* target_of(PyObject* weak_or_none) {  // borrowed: its owner is alive, or it is None
  if (weak_or_none == Py_None) return Py_None;
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* target = nullptr;
  if (PyWeakref_GetRef(weak_or_none, &target) < 0) throw py::error_already_set();
  Py_XDECREF(target);
  return target;
#else
  return PyWeakref_GetObject(weak_or_none);
#endif
}

bool same_values(const py::list& dicts, const py::tuple& keys, const py::list& known, const py::buffer& addresses_in,
                 const py::object& data_ptr) {
  const auto count = static_cast<Py_ssize_t>(dicts.size()), each = static_cast<Py_ssize_t>(keys.size());
  const py::buffer_info info = addresses_in.request();
  if (info.itemsize != 8 || info.ndim != 1) throw py::value_error("same_values: addresses: expected 64-bit integers");
  const auto* addresses = static_cast<const int64_t*>(info.ptr);
  if (static_cast<Py_ssize_t>(known.size()) != count * each || (info.size && info.size != count)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), i);
    if (!PyDict_Check(dict)) return false;
    for (Py_ssize_t k = 0; k < each; ++k) {
      PyObject* value = PyDict_GetItem(dict, PyTuple_GET_ITEM(keys.ptr(), k));
      if (!value) value = Py_None;
      if (value != target_of(PyList_GET_ITEM(known.ptr(), i * each + k))) return false;
      if (k == 0 && info.size && address_of(value, data_ptr) != addresses[i]) return false;
    }
  }
  return true;
}

const RegisterBinder registered([](py::module_& m) {
  m.def("same_tensors", &same_tensors, py::arg("tensors"), py::arg("known"), py::arg("addresses"), py::arg("data_ptr"),
        "Whether `tensors` are the very objects of `known`, at these addresses.");
  m.def("same_values", &same_values, py::arg("dicts"), py::arg("keys"), py::arg("known"), py::arg("addresses"),
        py::arg("data_ptr"),
        "Whether the dicts hold the objects that the weak references `known` stand for (None: no such key), those of "
        "the first key at these addresses; an empty array of addresses means any.");
});

}  // namespace
}  // namespace warpsmith::host
