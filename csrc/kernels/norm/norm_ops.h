#pragma once

// The ops of the family, one row each: ROW(op, layer, residual, dropout). Kernels, CPU loops, schemas and bindings,
// planners, C++ functions and sim tests are all generated from the rows.
//
//   op        its name, the same wherever it appears
//   layer     true: layer norm, with a mean and a bias; false: RMS norm, with a weight_offset
//   residual  true: x is added to a residual stream first, and the sum is a second output
//   dropout   true: elements of x are dropped before the addition; needs a residual
//
// This file is installed with the headers of the C++ functions, so it includes nothing.
#define WARPSMITH_NORM_OPS(ROW)                \
  ROW(rms_norm, false, false, false)           \
  ROW(layer_norm, true, false, false)          \
  ROW(add_rms_norm, false, true, false)        \
  ROW(add_layer_norm, true, true, false)       \
  ROW(dropout_add_rms_norm, false, true, true) \
  ROW(dropout_add_layer_norm, true, true, true)

// WARPSMITH_IF_##flag(text) expands to text if the flag is true, WARPSMITH_UNLESS_##flag(text) if it is false.
#define WARPSMITH_IF_true(...) __VA_ARGS__
#define WARPSMITH_IF_false(...)
#define WARPSMITH_UNLESS_true(...)
#define WARPSMITH_UNLESS_false(...) __VA_ARGS__
