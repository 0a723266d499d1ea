#pragma once
#include "attention_problem.h"
#include "kernels/attention/portable/attention_portable.h"
#include "kernels/attention/portable/portable_grid.h"

// Runs of the portable kernels of attention, compared with double precision.
namespace warpsmith::test {

inline constexpr Tolerance kLseTolerance{.ulps = 0, .relative = 1e-5, .absolute = 1e-5};

template <class T> void compare_forward(const AttentionData<T>& data) {
  expect_within("out", data.out.data, data.want_out, data.of_out);
  expect_close("lse", data.lse, data.want_lse, kLseTolerance);
}
template <class T> void compare_gradients(const AttentionData<T>& data) {
  expect_within("dq", data.dq.data, data.want_dq, data.of_dq);
  expect_within("dk", data.dk.data, data.want_dk, data.of_dk);
  expect_within("dv", data.dv.data, data.want_dv, data.of_dv);
  if (!data.shape.bias.empty()) {
    if (data.shape.bias_is_float)
      expect_within("dbias", data.dbias, data.want_dbias, data.of_dbias);
    else
      expect_within("dbias", data.narrow_dbias, data.want_dbias, data.of_dbias);
  }
  if (data.shape.sink) {
    if (data.shape.narrow_sink)
      expect_within("dsink", data.narrow_dsink, data.want_dsink, data.of_dsink);
    else
      expect_within("dsink", data.dsink, data.want_dsink, data.of_dsink);
  }
}

// By the law of the kernel that will run: backward_portable_ordered_dq takes delta from the rounded out.
template <class T> void solve_gradients(AttentionData<T>& data, bool with_dlse = true) {
  data.delta_of_rounded_out =
      attention::orders_dq(data.backward().problem, sim::options().properties.max_dynamic_shared_bytes);
  data.solve(true, with_dlse);
}

template <class T> void run_forward(AttentionData<T>& data) {
  data.poison_outputs();
  expect_ok(attention_forward_portable(data.forward(), nullptr));
  compare_forward(data);
}
// Reads what the forward gave, or, for kernels that take delta from it, the rounded out that the oracle takes it from.
template <class T> void run_backward(AttentionData<T>& data) {
  if (data.delta_of_rounded_out)
    for (size_t i = 0; i < data.out.data.size(); ++i)
      data.out.data[i] = from_float<T>(static_cast<float>(data.want_out[i]));
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
  solve_gradients(data);
  under_every_seed([&] {
    run_forward(data);
    same_bits_for_every_seed("out", data.out.data);
    run_backward(data);
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
