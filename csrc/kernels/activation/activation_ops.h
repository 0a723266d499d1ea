#pragma once

// The ops of the family, one row each: ROW(op, function, flag). Launchers, CPU loops, schemas and bindings, planners,
// C++ functions and sim tests are generated from the rows.
//
//   op        its name, the same wherever it appears
//   function  one of common/activation_functions.h
//   flag      tanh: the raw ops take a last argument `bool tanh`, which selects function##Tanh instead
//             plain: they do not
//
// This file is installed for the C++ functions (warpsmith/activation.h), so it includes nothing.

// y = f(gate) * up
#define WARPSMITH_GATED_OPS(ROW) \
  ROW(swiglu, Silu, plain)       \
  ROW(geglu, Gelu, tanh)         \
  ROW(reglu, Relu, plain)

// y = f(x + bias)
#define WARPSMITH_BIASED_OPS(ROW) \
  ROW(bias_gelu, Gelu, tanh)      \
  ROW(bias_silu, Silu, plain)     \
  ROW(bias_relu, Relu, plain)

// y = f(x)
#define WARPSMITH_UNARY_OPS(ROW) ROW(relu_squared, ReluSquared, plain)

// y = residual + dropout(x)
#define WARPSMITH_DROPOUT_OPS(ROW) ROW(dropout_add)

// Calls use(op, function) with the function that a row and the value of its flag select.
#define WARPSMITH_SELECT_plain(op, function, tanh, use) use(op, function)
#define WARPSMITH_SELECT_tanh(op, function, tanh, use) ((tanh) ? use(op, function##Tanh) : use(op, function))
// Calls use(op, function) for each function of a row.
#define WARPSMITH_EACH_plain(op, function, use) use(op, function)
#define WARPSMITH_EACH_tanh(op, function, use) use(op, function) use(op, function##Tanh)
