#include "host/elementwise.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("reglu",
                                 [](const pybind11::kwargs& given) { return plan_elementwise_of("reglu", given); });

}  // namespace
}  // namespace warpsmith::host
