#pragma once
#include "attention_sm90_runs.h"

// Runs of the Hopper kernels with bias tensors, boolean masks and ALiBi on the host, against double precision.
namespace warpsmith::test {

template <class T> void check_biased_forward(AttentionData<T>& data) {
  data.solve(true);  // of_out as well
  expect_ok(on_hopper(data.forward()));
  under_every_seed([&] {
    data.poison_outputs();
    expect_ok(run_forward(data));
    same_bits_for_every_seed("out", data.out.data);
    same_bits_for_every_seed("lse", data.lse);
    expect_within("out", data.out.data, data.want_out, data.of_out);
    expect_close("lse", data.lse, data.want_lse, kLseTolerance);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
  });
}
template <class T> void check_biased_forward(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  check_biased_forward(data);
}

template <class T> void compare_dbias(const AttentionData<T>& data) {
  if (!data.shape.bias.empty()) expect_within("dbias", data.narrow_dbias, data.want_dbias, data.of_dbias);
}
template <class T> void check_biased_backward(AttentionData<T>& data) {
  expect_ok(on_hopper(data.backward()));
  solve_gradients(data);
  under_every_seed([&] {
    data.poison_gradients();
    expect_ok(run_backward(data));
    same_bits_for_every_seed("dq", data.dq.data);
    same_bits_for_every_seed("dk", data.dk.data);
    same_bits_for_every_seed("dv", data.dv.data);
    same_bits_for_every_seed("dbias", data.narrow_dbias);
    compare_gradients(data);
    compare_dbias(data);
  });
}
template <class T> void check_biased_backward(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  check_biased_backward(data);
}

}  // namespace warpsmith::test
