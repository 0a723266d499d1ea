#pragma once
#include "attention_problem.h"
#include "kernels/attention/attention_portable.h"

// Runs of the portable kernels of attention, compared with double precision.
namespace warpsmith::test {

// P is rounded before it is multiplied with v, the quotient after: half a step of T for values about 1, and the last
// bit. In float, exponentials and sums are what rounds.
template <class T> Tolerance output_tolerance(double factor) {
  return {
      .ulps = 1, .relative = 0, .absolute = std::ldexp(factor, std::is_same_v<T, float> ? -19 : -kMantissaBits<T> - 1)};
}
inline constexpr Tolerance kLseTolerance{.ulps = 0, .relative = 1e-5, .absolute = 1e-5};

template <class T> void compare_forward(const AttentionData<T>& data) {
  const double factor = data.shape.dropout > 0 ? 1 / (1 - data.shape.dropout) : 1;
  expect_close("out", data.out.data, data.want_out, output_tolerance<T>(factor));
  expect_close("lse", data.lse, data.want_lse, kLseTolerance);
}

// P and dS are rounded before they are multiplied; six standard deviations are 3.5 roundings. In float, that of P is
// the error of its exponential, and what rounds is every addition: of the longest sum, which may be the one over a
// head's dimensions that makes dP.
template <class T> void compare_gradients(const AttentionData<T>& data) {
  const AttentionCase& shape = data.shape;
  const auto terms = static_cast<double>(
      std::max({data.length_q * shape.heads / shape.key_heads, data.length_k, shape.head_dim, shape.head_dim_v}));
  const double more = std::is_same_v<T, float> ? 2 * std::sqrt(terms) : 1;
  expect_sums("dq", data.dq.data, data.want_dq, data.squares_dq, 6 * more);
  expect_sums("dk", data.dk.data, data.want_dk, data.squares_dk, 6 * more);
  expect_sums("dv", data.dv.data, data.want_dv, data.squares_dv, 4 * more);
  if (!data.shape.bias.empty()) {
    if (data.shape.bias_is_float)
      expect_sums<float, T>("dbias", data.dbias, data.want_dbias, data.squares_dbias, 6 * more);
    else
      expect_sums("dbias", data.narrow_dbias, data.want_dbias, data.squares_dbias, 6 * more);
  }
  if (data.shape.sink) {
    if (data.shape.narrow_sink)
      expect_sums("dsink", data.narrow_dsink, data.want_dsink, data.squares_dsink, 6 * more);
    else
      expect_sums<float, T>("dsink", data.dsink, data.want_dsink, data.squares_dsink, 6 * more);
  }
}

template <class T> void run_forward(AttentionData<T>& data) {
  data.poison_outputs();
  expect_ok(attention_forward_portable(data.forward(), nullptr));
  compare_forward(data);
}
template <class T> void run_backward(AttentionData<T>& data) {
  AttentionBwdParams p = data.backward();
  const auto bytes = static_cast<size_t>(attention_backward_workspace_portable(p));
  if (data.workspace.size() != bytes) data.workspace = Buffer<unsigned char>(bytes);
  p.workspace = data.workspace.data();
  data.poison_gradients();
  expect_ok(attention_backward_portable(p, nullptr));
  compare_gradients(data);
}

// Forward, then backward from what the forward gave.
template <class T> void check(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  data.solve(true);
  under_every_seed([&] {
    run_forward(data);
    run_backward(data);
    same_bits_for_every_seed("out", data.out.data);
    same_bits_for_every_seed("lse", data.lse);
    same_bits_for_every_seed("dq", data.dq.data);
    same_bits_for_every_seed("dk", data.dk.data);
    same_bits_for_every_seed("dv", data.dv.data);
    same_bits_for_every_seed("dbias", data.dbias);
    same_bits_for_every_seed("narrow dbias", data.narrow_dbias);
    same_bits_for_every_seed("dsink", data.dsink);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
  });
}

}  // namespace warpsmith::test
