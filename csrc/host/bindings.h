#pragma once
#include <pybind11/pybind11.h>

#include <vector>

// What a file of csrc/host adds to the module besides a planner.
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
