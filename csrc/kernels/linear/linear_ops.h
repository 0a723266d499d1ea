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
