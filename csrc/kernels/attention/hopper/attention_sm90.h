#pragma once
#include "kernels/attention/attention.h"

// The Hopper kernels (sm_90a) implement attention.h for the problems that they support.
namespace warpsmith {

// `workspace_bytes` counts the Hopper kernels' own workspace.
AttentionForwardPlan attention_forward_plan_sm90(const AttentionFwdParams& params);
AttentionBackwardPlan attention_backward_plan_sm90(const AttentionBwdParams& params);

// `choice` and `plan` are supported.
Status attention_forward_sm90(const AttentionFwdParams& params, const AttentionForwardChoice& choice, void* stream);
// Makes dbias only if the plan says so.
Status attention_backward_sm90(const AttentionBwdParams& params, const AttentionBackwardPlan& plan, void* stream);

}  // namespace warpsmith
