#pragma once
#include <limits>
#include <optional>
#include <set>
#include <string>

#include "pymodule/plan.h"

namespace warpsmith::host {

// Thrown by a planner that was called without a problem: the keys it takes, and the values of each.
struct Keys {
  pybind11::dict keys;
};

// The keyword arguments of warpsmith.plan. A planner reads them one by one; a missing, wrong or unknown one is refused
// by name. Without any arguments every read succeeds, and refuse_unknown() throws the keys that were read, as Keys.
class Problem {
 public:
  Problem(const char* op, const pybind11::kwargs& given) : op_(op), given_(given), lists_(given.empty()) {}

  int64_t integer(const char* key, int64_t least, std::optional<int64_t> otherwise = std::nullopt) {
    if (lists_) {
      list(key, "an integer >= " + std::to_string(least), otherwise.has_value());
      return otherwise.value_or(least);
    }
    if (!has(key)) return otherwise ? *otherwise : missing(key);
    if (!pybind11::isinstance<pybind11::int_>(given_[key])) refuse(key, "an integer");
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(pybind11::object(given_[key]).ptr(), &overflow);
    if (overflow > 0 || value > kMost) refuse(key, "an integer <= " + std::to_string(kMost));
    if (overflow < 0 || value < least) refuse(key, "an integer >= " + std::to_string(least));
    return value;
  }

  // A multiple of `step`, from `step` to `most`.
  int64_t multiple(const char* key, int64_t step, int64_t most, std::optional<int64_t> otherwise = std::nullopt) {
    const std::string takes =
        std::to_string(step) + " to " + std::to_string(most) + " in steps of " + std::to_string(step);
    if (lists_) {
      list(key, takes, otherwise.has_value());
      return step;
    }
    if (!has(key)) return otherwise ? *otherwise : missing(key);
    const int64_t value = integer(key, std::numeric_limits<int64_t>::min());
    if (value < step || value > most || value % step != 0) refuse(key, takes);
    return value;
  }

  bool flag(const char* key, bool otherwise) {
    if (lists_) list(key, "True or False", true);
    if (!has(key)) return otherwise;
    if (!pybind11::isinstance<pybind11::bool_>(given_[key])) refuse(key, "True or False");
    return given_[key].cast<bool>();
  }

  std::string text(const char* key, const std::string& otherwise) {
    if (!has(key) || given_[key].is_none()) return otherwise;
    const std::string value = pybind11::str(given_[key]);
    return value.rfind("torch.", 0) == 0 ? value.substr(6) : value;
  }

  // The index of one of these names; without one, the first.
  template <size_t N> int one_of(const char* key, const char* const (&names)[N]) {
    std::string all;
    for (const char* name : names) all.append(all.empty() ? "" : ", ").append(name);
    if (lists_) list(key, "one of " + all, true);
    const std::string value = text(key, names[0]);
    for (size_t i = 0; i < N; ++i)
      if (value == names[i]) return static_cast<int>(i);
    refuse(key, "one of " + all);
  }

  // Of a CUDA floating dtype, by name or as torch.dtype.
  int dtype_bytes(const char* key, const std::string& otherwise) {
    if (lists_) list(key, "float32, float16 or bfloat16", true);
    const std::string value = text(key, otherwise);
    if (value == "float32") return 4;
    if (value == "float16" || value == "bfloat16") return 2;
    refuse(key, "float32, float16 or bfloat16");
  }

  void refuse_unknown() const {
    if (lists_) throw Keys{keys_};
    for (const auto& [key, value] : given_)
      if (!asked_.count(key.cast<std::string>())) {
        std::string known;
        for (const auto& name : asked_) known += (known.empty() ? "" : ", ") + name;
        throw pybind11::value_error("plan: " + op_ + ": expected arguments among " + known + ", got " +
                                    key.cast<std::string>());
      }
  }

 private:
  void list(const char* key, const std::string& takes, bool optional) {
    keys_[key] = takes + (optional ? "; may be left out" : "");
  }

  static constexpr int64_t kMost = int64_t(1) << 40;  // more than a GPU's memory holds, and far from overflow

  bool has(const char* key) {
    asked_.insert(key);
    return given_.contains(key);
  }

  [[noreturn]] int64_t missing(const char* key) const {
    throw pybind11::value_error("plan: " + op_ + ": " + key + ": expected a value, got none");
  }

  [[noreturn]] void refuse(const char* key, const std::string& expected) const {
    throw pybind11::value_error("plan: " + op_ + ": " + key + ": expected " + expected + ", got " +
                                pybind11::repr(given_[key]).cast<std::string>());
  }

  std::string op_;
  const pybind11::kwargs& given_;
  bool lists_;
  pybind11::dict keys_;
  std::set<std::string> asked_;
};

}  // namespace warpsmith::host
