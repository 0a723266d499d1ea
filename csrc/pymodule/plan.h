#pragma once
#include <pybind11/pybind11.h>

#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

// Which kernel would run, and why: each op's chooser registers itself here and becomes warpsmith.plan(op, **problem).
namespace warpsmith::host {

using namespace pybind11::literals;  // planners answer with dict("key"_a = value, ...)

using Planner = std::function<pybind11::dict(const pybind11::kwargs& problem)>;

inline std::map<std::string, Planner>& planners() {
  static std::map<std::string, Planner> all;
  return all;
}

struct RegisterPlanner {
  RegisterPlanner(const char* op, Planner planner) { planners()[op] = std::move(planner); }
};

// A row of a family's list of ops: what warpsmith._C.ops() says of it.
struct OpRow {
  std::string name, family, body, arguments;
};

inline std::vector<OpRow>& op_rows() {
  static std::vector<OpRow> all;
  return all;
}

struct RegisterRows {
  RegisterRows(const char* family, const char* body, std::initializer_list<std::pair<const char*, const char*>> rows) {
    for (const auto& [name, arguments] : rows) op_rows().push_back({name, family, body, arguments});
  }
};
// WARPSMITH_REGISTER_ROWS(activation, GATED); registers the rows of WARPSMITH_GATED_OPS.
#define WARPSMITH_OP_ROW_(op, ...) {#op, "" #__VA_ARGS__},
#define WARPSMITH_REGISTER_ROWS(family, body) \
  const RegisterRows body##_rows(#family, #body, {WARPSMITH_##body##_OPS(WARPSMITH_OP_ROW_)})

}  // namespace warpsmith::host
