#include "host/norm_plan.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("dropout_add_rms_norm", [](const pybind11::kwargs& given) {
  return plan_norm("dropout_add_rms_norm", false, true, given);
});

}  // namespace
}  // namespace warpsmith::host
