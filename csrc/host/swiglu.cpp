#include "host/elementwise.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("swiglu",
                                 [](const pybind11::kwargs& given) { return plan_elementwise_of("swiglu", given); });

}  // namespace
}  // namespace warpsmith::host
