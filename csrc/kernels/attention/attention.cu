#include "kernels/attention/attention.h"

#include <atomic>

#include "kernels/attention/hopper/attention_sm90.h"
#include "kernels/attention/portable/attention_portable.h"

// Chooses the kernels of a problem: the Hopper kernels (sm_90a) where the library contains them and they support the
// problem, otherwise the portable kernels, which support every option.
namespace warpsmith {
namespace {

std::atomic<bool> portable_alone{false};

#if defined(WARPSMITH_SM90A) || defined(WARPSMITH_SIM)
constexpr bool kHopperKernels = true;
#else
constexpr bool kHopperKernels = false;  // code that depends on it refers to functions that do not exist
#endif

}  // namespace

void attention_portable_alone(bool on) { portable_alone = on; }

Status attention_forward_plan_cuda(const AttentionFwdParams& p, AttentionForwardPlan& plan) {
  plan = {};
  if constexpr (kHopperKernels) {
    if (!portable_alone) plan = attention_forward_plan_sm90(p);
    if (plan.hopper.supported) return {};
  }
  return attention_forward_supported_portable(p);
}

Status attention_backward_plan_cuda(const AttentionBwdParams& p, AttentionBackwardPlan& plan) {
  plan = {};
  if constexpr (kHopperKernels) {
    if (!portable_alone) plan = attention_backward_plan_sm90(p);
    const bool portable_dbias = p.dbias != nullptr && !plan.hopper_dbias;
    if (plan.hopper.supported && (!portable_dbias || attention_backward_supported_portable(p).ok())) {
      plan.dbias_workspace = (plan.workspace_bytes + 255) / 256 * 256;
      if (portable_dbias) plan.workspace_bytes = plan.dbias_workspace + attention_dbias_workspace_portable(p);
      return {};
    }
    plan = {};
  }
  plan.workspace_bytes = attention_backward_workspace_portable(p);
  return attention_backward_supported_portable(p);
}

Status attention_forward_cuda(const AttentionFwdParams& p, const AttentionForwardPlan& plan, void* stream) {
  if constexpr (kHopperKernels)
    if (plan.hopper.supported) return attention_forward_sm90(p, plan.hopper, stream);
  return attention_forward_portable(p, stream);
}

Status attention_backward_cuda(const AttentionBwdParams& p, const AttentionBackwardPlan& plan, void* stream) {
  if constexpr (kHopperKernels) {
    if (plan.hopper.supported) {
      WARPSMITH_RETURN_IF_FAILED(attention_backward_sm90(p, plan, stream));
      if (p.dbias == nullptr || plan.hopper_dbias) return {};
      AttentionBwdParams x = p;
      x.workspace = static_cast<unsigned char*>(p.workspace) + plan.dbias_workspace;
      return attention_dbias_portable(x, stream);
    }
  }
  return attention_backward_portable(p, stream);
}

}  // namespace warpsmith
