// Planted bugs of a whole pipeline: the attention fixture with one thing left out, weakened or wrong.
#include "attention_sm90_oracle.h"
#include "planted.h"

namespace warpsmith::test {
namespace {

using attention_sm90::Bug;

// Three tiles of 128 queries on one multiprocessor; the last block of keys is not full. The maxima grow, so that some
// rows outgrow their base.
template <int keys> AttentionData& data() {
  static AttentionData d = [] {
    AttentionData made({1, 128, keys, 3, 1, false}, 17);
    for (size_t i = 0; i < made.k.size(); ++i)
      if (i / attention_sm90::kHeadDim < 40) made.k[i] = from_float<bfloat16>(3 * to_float(made.k[i]));
    made.solve();
    return made;
  }();
  return d;
}

template <Bug planted, int keys = 300> std::string run_fixture(bool bug) {
  sim::options().properties.multiprocessors = 1;
  AttentionData& d = data<keys>();
  d.o.poison();
  d.lse.poison();
  d.workspace[0] = d.workspace[1] = 0;
  const Status status = bug ? d.run<planted>() : d.run();
  if (!status.ok()) return status.what();
  constexpr double kTolerance = 0x1p-6;
  for (size_t i = 0; i < d.o.size(); ++i)
    if (!(std::fabs(static_cast<double>(to_float(d.o[i])) - d.expected_o[i]) < kTolerance)) return "wrong result";
  for (size_t i = 0; i < d.lse.size(); ++i)
    if (!(std::fabs(static_cast<double>(d.lse[i]) - d.expected_lse[i]) < kTolerance)) return "wrong result";
  return "";
}

PLANTED(attention_scores_not_waited_for, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::scores_not_waited_for>(bug);
}
PLANTED(attention_output_wait_too_weak, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::output_wait_too_weak>(bug);
}
PLANTED(attention_no_wgmma_fence, "plain", "begins with wgmma_fence()") {
  return run_fixture<Bug::no_wgmma_fence>(bug);
}
PLANTED(attention_not_committed, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::not_committed>(bug);
}
PLANTED(attention_wrong_parity, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::wrong_parity>(bug);
}
PLANTED(attention_half_the_bytes, "plain", "lacks 0 of 1 arrivals and -16384 bytes]") {
  return run_fixture<Bug::half_the_bytes>(bug);
}
PLANTED(attention_no_empty_arrival, "plain", "lacks 2 of 8 arrivals") {
  return run_fixture<Bug::no_empty_arrival>(bug);
}
PLANTED(attention_released_early, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::released_early>(bug);
}
// With one block a tile the loader can be two tiles ahead.
PLANTED(attention_slot_reused_early, "plain", "deadlock") { return run_fixture<Bug::slot_reused_early, 100>(bug); }
PLANTED(attention_values_before_keys, "plain", "wrong result") { return run_fixture<Bug::values_before_keys>(bug); }
PLANTED(attention_wrong_swizzle, "plain", "wrong result") { return run_fixture<Bug::wrong_swizzle>(bug); }
PLANTED(attention_probabilities_overwritten, "plain", "wrong result") {
  return run_fixture<Bug::probabilities_overwritten>(bug);
}
PLANTED(attention_no_named_barrier, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::no_named_barrier>(bug);
}
PLANTED(attention_one_warp_not_at_barrier, "plain", "more wait at named barrier 1") {
  return run_fixture<Bug::one_warp_not_at_barrier>(bug);
}
PLANTED(attention_one_barrier_for_two_stages, "plain", "bulk store: reads shared memory that ordinary stores wrote") {
  return run_fixture<Bug::one_barrier_for_two_stages>(bug);
}
PLANTED(attention_no_proxy_fence, "plain",
        "bulk store: reads shared memory that ordinary stores wrote without fence_async_shared()") {
  return run_fixture<Bug::no_proxy_fence>(bug);
}
PLANTED(attention_store_not_waited_for, "plain", "before the bulk copy into it has arrived") {
  return run_fixture<Bug::store_not_waited_for>(bug);
}
PLANTED(attention_no_mask, "plain", "wrong result") { return run_fixture<Bug::no_mask>(bug); }
PLANTED(attention_not_rescaled, "plain", "wrong result") { return run_fixture<Bug::not_rescaled>(bug); }
PLANTED(attention_registers_kept, "plain", "wait at setmaxnreg") { return run_fixture<Bug::registers_kept>(bug); }

}  // namespace
}  // namespace warpsmith::test
