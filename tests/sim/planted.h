#pragma once
#include <string>

#include "device/launch.h"
#include "device/tensor_map.h"
#include "harness.h"

// Bugs that were planted on purpose, each with the check that must catch it. A planted bug is a kernel with a `bool
// bug` template parameter; without the bug the same check must find nothing. tests/test_planted_bugs.py runs every one
// in its build.
namespace warpsmith::test {

// The function runs the kernel under the current schedule seed and returns what was noticed: "" if all is well.
#define PLANTED(name, variant, expected)                                                                         \
  static std::string planted_##name(bool bug);                                                                   \
  static const ::warpsmith::test::PlantedRegistration register_##name(#name, variant, expected, planted_##name); \
  static std::string planted_##name([[maybe_unused]] bool bug)

struct PlantedRegistration {
  PlantedRegistration(const char* name, const char* variant, const char* expected, std::string (*run)(bool bug));
};

// The launch's error, else "wrong result" if an element differs.
template <class T, class E> std::string outcome(const Status& status, const T& actual, const E& expected) {
  if (!status.ok()) return status.what();
  for (size_t i = 0; i < expected.size(); ++i)
    if (!(static_cast<double>(actual[i]) == static_cast<double>(expected[i]))) return "wrong result";
  return "";
}

// launch(kernel<true or false>, ...).
#define LAUNCH_PLANTED(bug, kernel, config, ...)                          \
  (bug ? launch(kernel<true>, config, nullptr __VA_OPT__(, ) __VA_ARGS__) \
       : launch(kernel<false>, config, nullptr __VA_OPT__(, ) __VA_ARGS__))

}  // namespace warpsmith::test
