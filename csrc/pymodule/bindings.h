#pragma once
#include <pybind11/pybind11.h>

#include <vector>

// Lets a file of csrc/pymodule add classes and functions to the module. Planners register themselves by plan.h.
namespace warpsmith::host {

using Binder = void (*)(pybind11::module_& module);

inline std::vector<Binder>& binders() {
  static std::vector<Binder> all;
  return all;
}

struct RegisterBinder {
  explicit RegisterBinder(Binder binder) { binders().push_back(binder); }
};

}  // namespace warpsmith::host
