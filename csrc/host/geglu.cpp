#include "host/elementwise.h"

namespace warpsmith::host {
namespace {

const RegisterPlanner registered("geglu",
                                 [](const pybind11::kwargs& given) { return plan_elementwise_of("geglu", given); });

}  // namespace
}  // namespace warpsmith::host
