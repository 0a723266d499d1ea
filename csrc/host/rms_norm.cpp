#include "host/norm_plan.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("rms_norm", [](const pybind11::kwargs& given) {
  return plan_norm("rms_norm", false, false, given);
});

}  // namespace
}  // namespace warpsmith::host
