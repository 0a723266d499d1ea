#pragma once

// The flag of a row in a family's list (kernels/activation/activation_ops.h). `tanh` is a last argument of the raw ops;
// `plain` adds no argument.
#define WARPSMITH_FLAG_SCHEMA_plain ""
#define WARPSMITH_FLAG_SCHEMA_tanh ", bool tanh"
#define WARPSMITH_FLAG_ARGUMENT_plain(Template, op) Template<op>
#define WARPSMITH_FLAG_ARGUMENT_tanh(Template, op) Template<op, bool>
