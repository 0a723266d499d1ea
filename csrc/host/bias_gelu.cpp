#include "host/biased.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("bias_gelu",
                                 [](const pybind11::kwargs& given) { return plan_biased_of("bias_gelu", given); });

}  // namespace
}  // namespace warpsmith::host
