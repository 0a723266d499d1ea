#include "host/norm_plan.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("dropout_add_layer_norm", [](const pybind11::kwargs& given) {
  return plan_norm("dropout_add_layer_norm", true, true, given);
});

}  // namespace
}  // namespace warpsmith::host
