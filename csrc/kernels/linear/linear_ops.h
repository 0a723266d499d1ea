#pragma once

// The ops of the family, a row each: ROW(op). Each is a linear layer or several, with what stands between and behind
// them, as one step of autograd; or the product of a matrix and its own transpose.
//
// The activations, a row each: ROW(activation, biased, gated, tanh).
//
//   activation  its name in Python; its number in the schemas is its place in the list, from 1 on (0: none)
//   biased      the row of kernels/activation/activation_ops.h that computes it and its derivative
//   gated       the row there that multiplies it by a second linear layer
//   tanh        the flag of both rows
//
// This file is installed for the C++ functions (warpsmith/linear.h), so it includes nothing.
#define WARPSMITH_LINEAR_OPS(ROW) \
  ROW(linear)                     \
  ROW(mlp)                        \
  ROW(gated_linear)               \
  ROW(scaled_linear)              \
  ROW(matmul_symmetric)

#define WARPSMITH_LINEAR_ACTIVATIONS(ROW) \
  ROW(relu, bias_relu, reglu, false)      \
  ROW(gelu, bias_gelu, geglu, false)      \
  ROW(gelu_tanh, bias_gelu, geglu, true)  \
  ROW(silu, bias_silu, swiglu, false)

// The options of scaled_linear are one integer in its schemas: a call from Python takes 0.3 us an argument.
//
//   bits 0, 1  scaling: 0 row, 1 tensor, 2 block
//   bits 2, 3  accumulate: 0 auto, 1 fast, 2 float32
//   flags      grad_e5m2: the gradient in e5m2; wgrad_high: the weight's gradient of what was not cast; power_of_two:
//              scales are such; emulate: products in float32 on a card too; watch: the largest magnitudes are returned
#define WARPSMITH_SCALED_FLAGS(ROW) \
  ROW(grad_e5m2, 16)                \
  ROW(wgrad_high, 32)               \
  ROW(power_of_two, 64)             \
  ROW(emulate, 128)                 \
  ROW(watch, 256)
