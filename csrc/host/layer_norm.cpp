#include "host/norm_plan.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("layer_norm", [](const pybind11::kwargs& given) {
  return plan_norm("layer_norm", true, false, given);
});

}  // namespace
}  // namespace warpsmith::host
