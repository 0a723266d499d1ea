#pragma once
#include "attention_problem.h"
#include "kernels/attention/hopper/attention_sm90.h"
#include "kernels/attention/portable/portable_grid.h"

// Runs of the Hopper kernels of attention, compared with double precision.
namespace warpsmith::test {

class Multiprocessors {
 public:
  explicit Multiprocessors(int count) { sim::options().properties.multiprocessors = count; }
  ~Multiprocessors() { sim::options().properties.multiprocessors = 132; }
};

// P is rounded before it is multiplied with v, the quotient after: half a step of T for values about 1, and the last
// bit.
template <class T> Tolerance output_tolerance() {
  return {.ulps = 1, .relative = 0, .absolute = std::is_same_v<T, bfloat16> ? 0x1p-8 : 0x1p-11};
}
inline constexpr Tolerance kLseTolerance{.ulps = 0, .relative = 1e-5, .absolute = 1e-5};

inline AttentionForwardPlan hopper_plan(const AttentionFwdParams& p) { return attention_forward_plan_sm90(p); }
inline AttentionBackwardPlan hopper_plan(const AttentionBwdParams& p) { return attention_backward_plan_sm90(p); }

// Whether a Hopper kernel takes the call, or why none does.
template <class P> Status on_hopper(const P& p) {
  const auto choice = hopper_plan(p).hopper;
  return choice.supported ? Status() : Status::unsupported(choice.why);
}

template <class T, class P, class Plan> void use_workspace(AttentionData<T>& data, P& p, const Plan& plan) {
  const auto bytes = static_cast<size_t>(plan.workspace_bytes);
  if (data.workspace.size() != bytes) data.workspace = Buffer<unsigned char>(bytes);
  p.workspace = data.workspace.data();
}

template <class T> Status run_forward(AttentionData<T>& data, AttentionFwdParams p) {
  AttentionForwardPlan plan;
  WARPSMITH_RETURN_IF_FAILED(attention_forward_plan_cuda(p, plan));
  use_workspace(data, p, plan);
  return attention_forward_cuda(p, plan, nullptr);
}
template <class T> Status run_forward(AttentionData<T>& data) { return run_forward(data, data.forward()); }

// Rows after the last packed sequence are zero, with lse -inf: as the oracle's untouched rows.
template <class T> void check_forward(const AttentionCase& shape, Tolerance tolerance = output_tolerance<T>()) {
  AttentionData<T> data(shape);
  data.solve(false);
  under_every_seed([&] {
    data.poison_outputs();
    expect_ok(run_forward(data));
    same_bits_for_every_seed("out", data.out.data);
    same_bits_for_every_seed("lse", data.lse);
    expect_close("out", data.out.data, data.want_out, tolerance);
    expect_close("lse", data.lse, data.want_lse, kLseTolerance);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
  });
}

template <class T> Status run_backward(AttentionData<T>& data, AttentionBwdParams p) {
  AttentionBackwardPlan plan;
  WARPSMITH_RETURN_IF_FAILED(attention_backward_plan_cuda(p, plan));
  use_workspace(data, p, plan);
  return attention_backward_cuda(p, plan, nullptr);
}
template <class T> Status run_backward(AttentionData<T>& data) { return run_backward(data, data.backward()); }

template <class T> void compare_gradients(const AttentionData<T>& data) {
  expect_within("dq", data.dq.data, data.want_dq, data.of_dq);
  expect_within("dk", data.dk.data, data.want_dk, data.of_dk);
  expect_within("dv", data.dv.data, data.want_dv, data.of_dv);
  if (data.shape.sink) expect_within("dsink", data.dsink, data.want_dsink, data.of_dsink);
}

// By the law of the kernel that will run.
template <class T> void solve_gradients(AttentionData<T>& data) {
  data.delta_of_rounded_out =
      on_hopper(data.backward()).ok() ||
      attention::orders_dq(data.backward().problem, sim::options().properties.max_dynamic_shared_bytes);
  data.solve(true);
}

template <class T> void check_backward(const AttentionCase& shape) {
  AttentionData<T> data(shape);
  solve_gradients(data);
  under_every_seed([&] {
    data.poison_gradients();
    expect_ok(run_backward(data));
    same_bits_for_every_seed("dq", data.dq.data);
    same_bits_for_every_seed("dk", data.dk.data);
    same_bits_for_every_seed("dv", data.dv.data);
    compare_gradients(data);
    expect_equal("bank conflicts", sim::counters().bank_conflicts, int64_t{0});
  });
}

}  // namespace warpsmith::test
