#pragma once
#include "kernels/attention/attention.h"

// The Hopper kernels (sm_90a) implement attention.h for the problems that they support. The functions mean what their
// namesakes there mean.
namespace warpsmith {

Status attention_forward_supported_sm90(const AttentionFwdParams& params);
Status attention_forward_workspace_sm90(const AttentionFwdParams& params, int64_t* bytes);
Status attention_forward_sm90(const AttentionFwdParams& params, void* stream);

Status attention_backward_supported_sm90(const AttentionBwdParams& params);
Status attention_backward_workspace_sm90(const AttentionBwdParams& params, int64_t* bytes);
// Makes dbias only where attention_dbias_on_sm90() says so. Then its address and strides fit the kernel.
Status attention_backward_sm90(const AttentionBwdParams& params, void* stream);
bool attention_dbias_on_sm90(const AttentionBwdParams& params);

}  // namespace warpsmith
