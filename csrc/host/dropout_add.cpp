#include "host/elementwise.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("dropout_add", [](const pybind11::kwargs& given) {
  return plan_elementwise_of("dropout_add", given);
});

}  // namespace
}  // namespace warpsmith::host
