#include "host/biased.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("bias_silu",
                                 [](const pybind11::kwargs& given) { return plan_biased_of("bias_silu", given); });

}  // namespace
}  // namespace warpsmith::host
