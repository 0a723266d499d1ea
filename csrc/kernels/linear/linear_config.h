#pragma once
#include <cstdint>

#include "kernels/linear/linear_ops.h"

// Who computes a linear layer's product and its activation: torch's product and then a kernel of ours, or one call of
// cuBLASLt whose epilogue has both. Pure functions of the problem, printable through warpsmith.plan(op, ...).
namespace warpsmith {

enum class LinearActivation : uint8_t {
  none,
#define WARPSMITH_ROW(activation, ...) activation,
  WARPSMITH_LINEAR_ACTIVATIONS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

constexpr const char* const kLinearActivations[] = {"none",
#define WARPSMITH_ROW(activation, ...) #activation,
                                                    WARPSMITH_LINEAR_ACTIVATIONS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
};

// One product of [rows, in_features] and [in_features, out_features], with the activation behind it; or, for the
// backward of an mlp, with the derivative of the activation.
struct LinearProblem {
  int64_t rows = 0, in_features = 1, out_features = 1;
  bool bfloat16 = true;
  LinearActivation activation = LinearActivation::none;
  bool derivative = false;  // of the activation, behind the product
  bool residual = false;    // added behind the activation
  bool aligned = true;      // every matrix on 16 bytes, its rows too
  bool library = true;      // the process has a cuBLASLt that this build can call
  int code_capability = 90;
};

struct LinearPlan {
  bool epilogue = false;  // of cuBLASLt
  const char* why = "";
};

// cuBLASLt's GELU is the form by tanh, approximated. Beside the bare product, on an H200 on 2026-11-24 in bfloat16
// (cuBLASLt 13.1, docs/design/linear.md): bias and GELU 1.03 to 1.21 where product and kernel took 1.21 to 1.55, with
// the pre-activation written 1.11 to 1.36. On cards before Hopper the library runs it as a kernel of its own with one
// more write. In float16 nobody has measured its error, so it is not used there. ReLU's epilogue writes a bit mask for
// the backward, which our kernels do not read.
//
// The derivative's epilogue leaves the bias's gradient to one more pass, which our kernel makes on the way. So it pays
// where the matrix does not stay in the second-level cache: an mlp's backward without it over with it, H200,
// 2026-11-27: 16.8 M elements 0.96, 25 M 0.95, 33.5 M 0.99, 67 M 1.007 to 1.03, 200 M and more 1.00 to 1.055.
constexpr int64_t kCachedElements = int64_t{1} << 25;

constexpr LinearPlan choose_linear(const LinearProblem& p) {
  if (p.activation == LinearActivation::none) return {false, "torch's product, which adds the bias itself"};
  if (!p.library) return {false, "torch's product, then our kernel: no cuBLASLt that this build can call"};
  if (p.activation != LinearActivation::gelu_tanh)
    return {false, "torch's product, then our kernel: cuBLASLt has no such epilogue, or none that is exact"};
  if (p.residual)
    return {false, "torch's product, then our kernels: no epilogue adds a residual behind the activation"};
  if (!p.bfloat16) return {false, "torch's product, then our kernel: the epilogue's error is known in bfloat16 alone"};
  if (p.code_capability != 90)
    return {false, "torch's product, then our kernel: the epilogue was measured to pay on sm_90 alone"};
  if (!p.aligned) return {false, "torch's product, then our kernel: the epilogue needs rows on 16 bytes"};
  if (p.derivative && p.rows * p.out_features <= kCachedElements)
    return {false, "torch's product, then our kernel, which sums the bias's gradient too"};
  if (p.rows == 0 || p.in_features == 0 || p.out_features == 0) return {false, "nothing to multiply"};
  return {true, "cuBLASLt's epilogue: bias, activation and pre-activation in the product"};
}

// How products of 8-bit floats are summed on the card.
enum class ScaledAccumulate : uint8_t { automatic, fast, float32 };
constexpr const char* const kScaledAccumulate[] = {"auto", "fast", "float32"};

// Fast sums keep 13 bits of fraction beside the largest of 32 terms. By the rule that MMA-Sim found, they cost 50 dB
// and more up to 16,384 terms, where the casts leave 28; at 128,256 terms 40 dB and a bias of 0.2 %. Blocks of 128
// terms are always added in float32.
constexpr int64_t kFastTerms = 16'384;
constexpr bool accumulates_fast(ScaledAccumulate how, int64_t terms, bool blocks) {
  return !blocks && (how == ScaledAccumulate::fast || (how == ScaledAccumulate::automatic && terms <= kFastTerms));
}

}  // namespace warpsmith
