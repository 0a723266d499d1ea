#include "host/elementwise.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("relu_squared", [](const pybind11::kwargs& given) {
  return plan_elementwise_of("relu_squared", given);
});

}  // namespace
}  // namespace warpsmith::host
