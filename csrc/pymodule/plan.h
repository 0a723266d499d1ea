#pragma once
#include <pybind11/pybind11.h>

#include <functional>
#include <map>
#include <string>
#include <utility>

// Which kernel would run, and why: each op's chooser registers itself here and becomes warpsmith.plan(op, **problem).
namespace warpsmith::host {

using Planner = std::function<pybind11::dict(const pybind11::kwargs& problem)>;

inline std::map<std::string, Planner>& planners() {
  static std::map<std::string, Planner> all;
  return all;
}

struct RegisterPlanner {
  RegisterPlanner(const char* op, Planner planner) { planners()[op] = std::move(planner); }
};

}  // namespace warpsmith::host
