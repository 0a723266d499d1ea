#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <unordered_set>
#include <vector>

#include "common/tensor_list.h"
#include "kernels/optim/gradient.h"
#include "pymodule/bindings.h"
#include "pymodule/dlpack.h"

// The per-step bookkeeping of multi-tensor optimizers: whether thousands of tensors are still where they were, and
// where their gradients are. One pass of C calls, without knowing torch: 0.06 us a tensor by DLPack's exchange
// interface, which takes the interpreter's lock each time; a Tensor[] argument of an op costs 0.12 us. Most of the
// tensors are states. For a tensor that is the same object as before, torch's own reader of an address (0.01 us) is
// enough.
namespace py = pybind11;

namespace warpsmith::host {
namespace {

using Address = int64_t;
using ReadAddress = void* (*)(PyObject*);  // of a tensor object; throws for a tensor without memory

// Where a tensor object and torch's record of it were at the last look. Only prefetched, never read through.
struct Seen {
  const void* object = nullptr;
  const char* sizes = nullptr;
};

// Where a tensor's elements lie. Its sizes, then its strides, are in one vector that all of them share.
struct TensorAddress {
  Address address = 0;
  dlpack::Device device{};
  dlpack::DataType dtype{};
  int32_t dims = 0;
  uint32_t sizes_at = 0;
  bool sharded = false;   // a distributed tensor: its local part is meant
  bool negative = false;  // memory holds the negatives of its values
  bool single = false;    // one element
  Seen seen;
};

// A training step between two looks evicts all of these from the caches, so each is prefetched kAhead entries early.
// The sizes lie in the middle of torch's record of a tensor.
constexpr size_t kAhead = 12;
inline void prefetch(const Seen& seen) {
  __builtin_prefetch(seen.object);
  for (int line = -1; line <= 2; ++line) __builtin_prefetch(seen.sizes + 64 * line);
}

// A tensor, or the local part of a distributed one.
class View {
 public:
  View(const dlpack::ExchangeApi& api, const py::object& local, PyObject* tensor, bool sharded) : tensor_(tensor) {
    if (sharded) {
      part_ = py::reinterpret_steal<py::object>(PyObject_Vectorcall(local.ptr(), &tensor, 1, nullptr));
      tensor_ = part_.ptr();
    }
    readable_ = tensor_ && api.tensor_from_object(tensor_, &at_) == 0;
    if (!readable_) PyErr_Clear();
  }

  PyObject* tensor() const { return tensor_; }
  bool readable() const { return readable_; }  // false for a sparse tensor, or no tensor
  const dlpack::Tensor& at() const { return at_; }
  Address address() const { return reinterpret_cast<Address>(at_.data) + static_cast<Address>(at_.byte_offset); }

  bool empty() const {
    for (int32_t i = 0; i < at_.ndim; ++i)
      if (at_.shape[i] == 0) return true;
    return false;
  }

 private:
  py::object part_;
  PyObject* tensor_;
  dlpack::Tensor at_{};
  bool readable_ = false;
};

class TensorWatch {
 public:
  // params: the parameter lists of all groups.
  // buckets: for each parameter the column that takes its gradient's address; -1 where there is no gradient.
  // state, names: the state tensors by name, of each parameter that has a bucket.
  // read_address: a ReadAddress as a number; 0 where torch has none.
  TensorWatch(const py::capsule& exchange_api, py::object local, const py::list& params, const py::dict& state,
              const py::tuple& names, const std::vector<int>& buckets, uintptr_t read_address)
      : api_(dlpack::find(exchange_api)),
        local_(std::move(local)),
        read_address_(reinterpret_cast<ReadAddress>(read_address)) {
    for (const auto& group : params) {
      const auto list = py::cast<py::list>(group);
      group_sizes_.push_back(static_cast<Py_ssize_t>(list.size()));
      for (const auto& p : list) {
        params_.push_back(py::reinterpret_borrow<py::object>(p));
        getters_.push_back(getter_of(p.ptr()));
      }
    }
    if (buckets.size() != params_.size())
      throw py::value_error("TensorWatch: buckets: expected one for each parameter");
    seen_.resize(params_.size(), kNoGradient);
    param_addresses_.resize(params_.size());
    grads_.resize(params_.size());
    std::unordered_set<const PyObject*> active;
    for (size_t i = 0; i < params_.size(); ++i) {
      slots_.push_back({buckets[i], 0});
      if (buckets[i] < 0) continue;
      param_addresses_[i] = address_of(params_[i].ptr());
      active.insert(params_[i].ptr());
      const auto bucket = static_cast<size_t>(buckets[i]);
      if (bucket >= columns_.size()) columns_.resize(bucket + 1);
      slots_[i].at = columns_[bucket].addresses.size();
      columns_[bucket].addresses.push_back(kNoGradient);
    }
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value);) {
      const bool watched = active.count(key) > 0;
      owners_.push_back({key, watched ? PyDict_Size(value) : -1, seen_dict(value)});
      if (owners_.back().entries < 0) PyErr_Clear();
      PyObject *name, *tensor;
      for (Py_ssize_t k = 0; watched && PyDict_Next(value, &k, &name, &tensor);) {
        const bool counts = PySequence_Contains(names.ptr(), name) == 1;
        entries_.push_back(
            {py::reinterpret_borrow<py::object>(name), tensor, counts, counts ? address_of(tensor) : TensorAddress()});
      }
    }
  }

  // Returns whether all parameters and states are where they were. If so, the columns hold the gradients' present
  // addresses; unusual() lists the others, which the caller must examine itself.
  bool look(const py::list& params, const py::dict& state) {
    unusual_.clear();
    return look_at_params(params) && look_at_states(state);
  }

  const std::vector<size_t>& unusual() const { return unusual_; }

  // address: an entry of kernels/optim/gradient.h. like_param: it is the gradient's own, not a copy's. A gradient at
  // that address is not examined again.
  void set_gradient(size_t index, Address address, bool like_param) {
    seen_.at(index) = like_param ? address : kNoGradient;
    write(slots_.at(index), address);
  }

  py::bytearray column(size_t bucket) const {
    const auto& a = columns_.at(bucket).addresses;
    return py::bytearray(reinterpret_cast<const char*>(a.data()), a.size() * sizeof(Address));
  }

  int64_t version(size_t bucket) const { return columns_.at(bucket).version; }
  bool mixed(size_t bucket) const { return columns_.at(bucket).marked != 0; }

 private:
  struct Slot {
    int bucket;
    size_t at;
  };
  struct Column {
    std::vector<Address> addresses;
    int64_t version = 0;  // grows with every change
    int64_t marked = 0;   // entries with a dtype
  };
  struct Owner {            // of states
    const PyObject* param;  // only compared; one that counts is kept by params_
    Py_ssize_t entries;     // of its dict; -1: not looked at
    Seen dict;              // and its keys
  };
  struct Entry {
    py::object name;
    const PyObject* tensor;  // only compared
    bool watched;
    TensorAddress place;
  };

  // Returns the C function behind `is_neg` of torch's tensors: a third of the time of a call by name.
  static PyCFunction negative_reader() {
    const auto method = py::module_::import("torch").attr("Tensor").attr("is_neg");
    if (!Py_IS_TYPE(method.ptr(), &PyMethodDescr_Type))
      throw py::value_error("TensorWatch: expected Tensor.is_neg in C");
    return reinterpret_cast<PyMethodDescrObject*>(method.ptr())->d_method->ml_meth;
  }

  // Returns the C function behind `grad` if the type has one: half the time of a look-up by name.
  const PyGetSetDef* getter_of(PyObject* param) const {
    const auto attribute = py::reinterpret_steal<py::object>(
        PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(param)), grad_name_.ptr()));
    if (!attribute) throw py::error_already_set();
    if (!Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type)) return nullptr;
    return reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr())->d_getset;
  }

  static Seen seen_dict(PyObject* dict) {
    if (!PyDict_Check(dict)) return {dict, nullptr};
    return {dict, reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(dict)->ma_keys)};
  }

  TensorAddress address_of(PyObject* tensor) {
    TensorAddress place;
    place.sharded = PyObject_HasAttrString(tensor, "to_local");
    const View view(api_, local_, tensor, place.sharded);
    if (!view.readable()) throw py::value_error("TensorWatch: expected strided tensors");
    place.address = view.address();
    place.device = view.at().device;
    place.dtype = view.at().dtype;
    place.dims = view.at().ndim;
    place.seen = {tensor, reinterpret_cast<const char*>(view.at().shape)};
    place.sizes_at = static_cast<uint32_t>(sizes_.size());
    place.negative = is_negative(view);
    place.single = std::all_of(view.at().shape, view.at().shape + place.dims, [](int64_t size) { return size == 1; });
    sizes_.insert(sizes_.end(), view.at().shape, view.at().shape + place.dims);
    sizes_.insert(sizes_.end(), view.at().strides, view.at().strides + place.dims);
    return place;
  }

  // dtype, device, sizes and strides.
  bool same_kind(const TensorAddress& place, const View& view) const {
    return same_layout(place, view) && view.at().dtype == place.dtype;
  }

  // Device, sizes and strides; strides of dimensions of one element mean nothing.
  bool same_layout(const TensorAddress& place, const View& view) const {
    const dlpack::Tensor& at = view.at();
    if (!view.readable() || at.ndim != place.dims || !(at.device == place.device)) return false;
    const int64_t *sizes = sizes_.data() + place.sizes_at, *strides = sizes + place.dims;
    for (int32_t i = 0; i < place.dims; ++i)
      if (at.shape[i] != sizes[i] || (sizes[i] > 1 && at.strides[i] != strides[i])) return false;
    return true;
  }

  bool is_at(const TensorAddress& place, PyObject* tensor) const {
    const View view(api_, local_, tensor, place.sharded);
    if (!same_kind(place, view) || view.address() != place.address) return false;
    return (tensor == place.seen.object && !place.single) || is_negative(view) == place.negative;
  }

  // For the object that was here at the last look, compares only the address; examines any other object. Enough for
  // states and for parameters of one dimension: those have one order, and a changed length shows in the gradient.
  bool is_still(const TensorAddress& place, const PyObject* known, PyObject* tensor) const {
    if (!read_address_ || tensor != known || place.sharded) return is_at(place, tensor);
    try {
      return reinterpret_cast<Address>(read_address_(tensor)) == place.address;
    } catch (const std::exception&) {  // it has become sparse, or meta
      return false;
    }
  }

  bool look_at_params(const py::list& params) {
    if (params.size() != group_sizes_.size()) return false;
    size_t i = 0;
    for (size_t g = 0; g < group_sizes_.size(); ++g) {
      PyObject* group = PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(g));
      if (!PyList_Check(group) || PyList_GET_SIZE(group) != group_sizes_[g]) return false;
      for (Py_ssize_t k = 0; k < group_sizes_[g]; ++k, ++i) {
        if (i + kAhead < params_.size()) {
          prefetch(param_addresses_[i + kAhead].seen);
          prefetch(grads_[i + kAhead]);
        }
        PyObject* param = PyList_GET_ITEM(group, k);
        if (param != params_[i].ptr()) return false;
        const TensorAddress& place = param_addresses_[i];
        const bool by_address = place.dims <= 1 && !place.single;
        if (slots_[i].bucket >= 0 && !(by_address ? is_still(place, param, param) : is_at(place, param))) return false;
        if (!look_at_gradient(i)) return false;
      }
    }
    return true;
  }

  bool look_at_gradient(size_t i) {
    const auto grad = py::reinterpret_steal<py::object>(grad_of(i));
    if (!grad) throw py::error_already_set();
    const Slot slot = slots_[i];
    if (slot.bucket < 0) return grad.is_none();
    if (grad.is_none()) {
      write(slot, kNoGradient);
      return true;
    }
    const TensorAddress& param = param_addresses_[i];
    const View view(api_, local_, grad.ptr(), param.sharded);
    const Address address = view.readable() && view.address() == 0 && view.empty() ? kNoElements : view.address();
    const bool known = grads_[i].object == grad.ptr() && !param.single;
    // A distributed gradient at a known address may still be placed differently over the ranks.
    grads_[i] = {grad.ptr(), reinterpret_cast<const char*>(view.at().shape)};
    const bool alike = same_kind(param, view);
    if (!alike && !is_at(param, params_[i].ptr())) return false;  // both have changed, at the address that was
    const Address mark = alike ? 0 : mark_of(param, view), entry = address == kNoElements ? address : address | mark;
    if (mark >= 0 && address != 0 && (!param.sharded || entry == seen_[i]) && (known || !is_negative(view))) {
      write(slot, entry);
    } else {
      grads_[i].object = nullptr;
      unusual_.push_back(i);
    }
    return true;
  }

  // Walks the dicts in their order, which is cheaper than looking names up.
  bool look_at_states(const py::dict& state) const {
    if (state.size() != owners_.size()) return false;
    auto owner = owners_.begin();
    auto entry = entries_.begin();
    PyObject *param, *dict, *name, *tensor;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &param, &dict); ++owner) {
      if (owner == owners_.end() || param != owner->param) return false;
      if (owners_.end() - owner > 4) prefetch((owner + 4)->dict);
      if (owner->entries < 0) continue;
      if (!PyDict_Check(dict) || PyDict_Size(dict) != owner->entries) return false;
      for (Py_ssize_t k = 0; PyDict_Next(dict, &k, &name, &tensor); ++entry) {
        if (static_cast<size_t>(entries_.end() - entry) > kAhead) prefetch((entry + kAhead)->place.seen);
        if (name != entry->name.ptr() || (entry->watched && !is_still(entry->place, entry->tensor, tensor)))
          return false;
      }
    }
    return owner == owners_.end();
  }

  // What marks the address of a gradient in another dtype than its parameter's; -1: the kernels do not take it.
  Address mark_of(const TensorAddress& param, const View& view) const {
    const auto dtype_of = [](const dlpack::DataType& d) {
      for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16})
        if (d == dlpack::DataType{dtype == Dtype::bfloat16 ? dlpack::kBfloat : dlpack::kFloat,
                                  static_cast<uint8_t>(8 * size_bytes(dtype)), 1})
          return dtype;
      return Dtype::float64;
    };
    if (!same_layout(param, view)) return -1;
    const Dtype own = dtype_of(view.at().dtype);
    return own == Dtype::float64 || dtype_of(param.dtype) == Dtype::float64 ? -1 : gradient_mark(own);
  }

  PyObject* grad_of(size_t i) const {
    PyObject* param = params_[i].ptr();
    const PyGetSetDef* get = getters_[i];
    return get ? get->get(param, get->closure) : PyObject_GetAttr(param, grad_name_.ptr());
  }

  // Returns whether the tensor has torch's negative bit: memory holds the negatives of its values. DLPack does not say
  // so. The imaginary part of a conjugate has it, at a stride of 2: of dense tensors only those of one element can get
  // or lose the bit as the objects that they are, so only those are asked at every look.
  bool is_negative(const View& view) const {
    const auto answer = py::reinterpret_steal<py::object>(is_negative_(view.tensor(), nullptr));
    if (!answer) throw py::error_already_set();
    return answer.ptr() == Py_True;
  }

  void write(const Slot& slot, Address address) {
    Column& column = columns_[static_cast<size_t>(slot.bucket)];
    Address& entry = column.addresses[slot.at];
    if (entry == address) return;
    column.marked += (address >> kGradientDtypeShift != 0) - (entry >> kGradientDtypeShift != 0);
    entry = address;
    ++column.version;
  }

  const dlpack::ExchangeApi& api_;
  py::object local_;
  ReadAddress read_address_;
  py::str grad_name_ = py::reinterpret_steal<py::str>(PyUnicode_InternFromString("grad"));
  PyCFunction is_negative_ = negative_reader();
  std::vector<py::object> params_;
  std::vector<const PyGetSetDef*> getters_;
  std::vector<Py_ssize_t> group_sizes_;
  std::vector<TensorAddress> param_addresses_;
  std::vector<Seen> grads_;  // at the last look; without an object if it was unusual
  std::vector<int64_t> sizes_;
  std::vector<Owner> owners_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;
  std::vector<Column> columns_;
  std::vector<Address> seen_;  // where a gradient was that set_gradient found like its parameter
  std::vector<size_t> unusual_;
};

const RegisterBinder registered([](py::module_& m) {
  m.attr("NO_ELEMENTS") = kNoElements;
  py::dict marks;  // by dtype
  for (const Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16}) marks[name(dtype)] = gradient_mark(dtype);
  m.attr("GRADIENT_MARKS") = marks;
  py::class_<TensorWatch>(m, "TensorWatch",
                          "The places of parameters and states, and the addresses of gradients in columns.")
      .def(py::init<const py::capsule&, py::object, const py::list&, const py::dict&, const py::tuple&,
                    const std::vector<int>&, uintptr_t>(),
           py::arg("exchange_api"), py::arg("local"), py::arg("params"), py::arg("state"), py::arg("names"),
           py::arg("buckets"), py::arg("read_address") = 0)
      .def("look", &TensorWatch::look, py::arg("params"), py::arg("state"),
           "Whether all are where they were; then the columns are those of now, but for the unusual gradients.")
      .def_property_readonly("unusual", &TensorWatch::unusual,
                             "Parameters whose gradient must be examined: other strides, dtype, device or layout.")
      .def("set_gradient", &TensorWatch::set_gradient, py::arg("index"), py::arg("address"), py::arg("like_param"))
      .def("column", &TensorWatch::column, py::arg("bucket"), "Addresses of a bucket's gradients, 64 bits each.")
      .def("version", &TensorWatch::version, py::arg("bucket"), "Another number for every change of a column.")
      .def("mixed", &TensorWatch::mixed, py::arg("bucket"), "Whether a gradient has another dtype than its parameter.");
});

}  // namespace
}  // namespace warpsmith::host
