#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "pymodule/bindings.h"

// Whether the thousands of objects that a captured step fixes are the objects that they were: one pass of C calls
// before every replay. Python's own comparison takes ten times as long.
namespace py = pybind11;

namespace warpsmith::host {
namespace {

using ReadAddress = void* (*)(PyObject*);  // of a tensor object; throws for a tensor without memory

// The C function behind a tensor's attribute, for one type of tensors. Half the time of a look-up by name.
class Getter {
 public:
  explicit Getter(const char* name) : name_(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name))) {}

  // Returns whether the attribute is this object, which has an owner of its own: None, True or False.
  bool is(PyObject* tensor, const PyObject* wanted) {
    if (Py_TYPE(tensor) != type_) find(Py_TYPE(tensor));
    PyObject* value = get_ ? get_->get(tensor, get_->closure) : PyObject_GetAttr(tensor, name_.ptr());
    if (!value) throw py::error_already_set();
    Py_DECREF(value);
    return value == wanted;
  }

 private:
  void find(PyTypeObject* type) {
    const auto attribute =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_.ptr()));
    if (!attribute) throw py::error_already_set();
    const bool native = Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type);
    get_ = native ? reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset : nullptr;
    type_ = type;
  }

  py::str name_;
  const PyTypeObject* type_ = nullptr;
  const PyGetSetDef* get_ = nullptr;
};

class StepWatch {
 public:
  // containers: (a dict, list or tuple; whether its length is watched; (key, value, kind) of each entry in its order).
  //   kind: 0 may change, 1 the object stays, 2 the value stays. A dict whose length is not watched has those of 1 and
  //   2 alone, in any order.
  // tensors, addresses: each tensor's address. trained: tensors, with their requires_grad.
  // read_address: a ReadAddress as a number.
  //
  // References are borrowed: the caller keeps all objects. An owner here, which Python's garbage collector does not
  // look into, would keep a training step alive that refers to its own capture.
  StepWatch(const py::list& containers, const py::list& tensors, const std::vector<int64_t>& addresses,
            const py::list& trained, const std::vector<bool>& requires_grad, uintptr_t read_address)
      : read_address_(reinterpret_cast<ReadAddress>(read_address)) {
    if (tensors.size() != addresses.size() || trained.size() != requires_grad.size())
      throw py::value_error("StepWatch: expected an address for each tensor, and requires_grad for each trained one");
    for (const auto& row : containers) {
      const auto parts = py::cast<py::tuple>(row);
      PyObject* object = parts[0].ptr();
      if (!PyDict_Check(object) && !PyList_Check(object) && !PyTuple_Check(object))
        throw py::value_error("StepWatch: containers: expected dicts, lists and tuples");
      containers_.push_back({object, parts[1].cast<bool>(), entries_.size(), 0});
      for (const auto& entry : parts[2].cast<py::list>()) {
        const auto [key, value, kind] = entry.cast<std::tuple<py::object, py::object, int>>();
        entries_.push_back({key.ptr(), value.ptr(), kind});
      }
      containers_.back().end = entries_.size();
    }
    for (size_t i = 0; i < addresses.size(); ++i) tensors_.push_back({PyList_GET_ITEM(tensors.ptr(), i), addresses[i]});
    for (size_t i = 0; i < requires_grad.size(); ++i)
      trained_.push_back({PyList_GET_ITEM(trained.ptr(), i), requires_grad[i]});
  }

  // False also where a closer look would find equal values: the caller takes that.
  bool same() {
    for (const Container& c : containers_)
      if (!(PyDict_Check(c.object) ? c.sized ? same_dict(c) : same_entries(c) : same_sequence(c))) return false;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (i + kAhead < tensors_.size()) __builtin_prefetch(tensors_[i + kAhead].object);
      if (!is_at(tensors_[i])) return false;
    }
    for (const Trained& t : trained_)
      if (!requires_grad_.is(t.object, t.requires_grad ? Py_True : Py_False)) return false;
    return true;
  }

 private:
  struct Container {
    PyObject* object;
    bool sized;
    size_t begin, end;  // of its entries
  };
  struct Entry {
    PyObject *key, *value;  // of kind 0 only compared
    int kind;
  };
  struct ObjectAddress {
    PyObject* object;
    int64_t address;
  };
  struct Trained {
    PyObject* object;
    bool requires_grad;
  };
  static constexpr size_t kAhead = 12;

  static bool is_still(const Entry& entry, PyObject* value) {
    if (value == entry.value || entry.kind == 0) return true;
    if (entry.kind != 2 || Py_TYPE(value) != Py_TYPE(entry.value)) return false;
    const int equal = PyObject_RichCompareBool(value, entry.value, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
  }

  bool same_dict(const Container& c) const {
    size_t i = c.begin;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(c.object, &at, &key, &value); ++i)
      if (i == c.end || key != entries_[i].key || !is_still(entries_[i], value)) return false;
    return i == c.end;
  }

  bool same_entries(const Container& c) const {
    for (size_t i = c.begin; i < c.end; ++i) {
      PyObject* value = PyDict_GetItemWithError(c.object, entries_[i].key);
      if (!value) PyErr_Clear();
      if (!value || !is_still(entries_[i], value)) return false;
    }
    return true;
  }

  bool same_sequence(const Container& c) const {
    if (PySequence_Fast_GET_SIZE(c.object) != static_cast<Py_ssize_t>(c.end - c.begin)) return false;
    PyObject** items = PySequence_Fast_ITEMS(c.object);
    for (size_t i = c.begin; i < c.end; ++i)
      if (!is_still(entries_[i], items[i - c.begin])) return false;
    return true;
  }

  bool is_at(const ObjectAddress& place) const {
    try {
      return reinterpret_cast<int64_t>(read_address_(place.object)) == place.address;
    } catch (const std::exception&) {  // it has become sparse, or meta
      return false;
    }
  }

  ReadAddress read_address_;
  Getter requires_grad_{"requires_grad"};
  std::vector<Container> containers_;
  std::vector<Entry> entries_;
  std::vector<ObjectAddress> tensors_;
  std::vector<Trained> trained_;
};

bool have_gradients(const py::list& tensors) {
  Getter grad("grad");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i)
    if (!grad.is(PyList_GET_ITEM(tensors.ptr(), i), Py_None)) return true;
  return false;
}

const RegisterBinder registered([](py::module_& m) {
  py::class_<StepWatch>(m, "StepWatch", "The containers, tensors and numbers that a captured step fixes.")
      .def(py::init<const py::list&, const py::list&, const std::vector<int64_t>&, const py::list&,
                    const std::vector<bool>&, uintptr_t>(),
           py::arg("containers"), py::arg("tensors"), py::arg("addresses"), py::arg("trained"),
           py::arg("requires_grad"), py::arg("read_address"))
      .def("same", &StepWatch::same, "Whether all are what they were. False: a closer look may still find them equal.");
  m.def("have_gradients", &have_gradients, py::arg("tensors"), "Whether any of the tensors has a gradient.");
});

}  // namespace
}  // namespace warpsmith::host
