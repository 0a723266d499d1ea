#pragma once
#include <pybind11/pybind11.h>

#include <map>
#include <string>

// Which kernel would run, and why: each op's chooser registers itself here and becomes warpsmith.plan(op, **problem).
namespace warpsmith::host {

using Planner = pybind11::dict (*)(const pybind11::kwargs& problem);

inline std::map<std::string, Planner>& planners() {
  static std::map<std::string, Planner> all;
  return all;
}

struct RegisterPlanner {
  RegisterPlanner(const char* op, Planner planner) { planners()[op] = planner; }
};

}  // namespace warpsmith::host
