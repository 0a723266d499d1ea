#pragma once
#include "kernels/attention/attention.h"

// The portable kernels (code of sm_80 and newer) implement attention.h with every option. Addresses and strides of q,
// k, v, out and their gradients must be multiples of 16 bytes; strides may be 0. Whoever runs a call has asked before
// whether it is supported.
namespace warpsmith {

Status attention_forward_supported_portable(const AttentionFwdParams& params);
Status attention_forward_portable(const AttentionFwdParams& params, void* stream);

Status attention_backward_supported_portable(const AttentionBwdParams& params);
int64_t attention_backward_workspace_portable(const AttentionBwdParams& params);
Status attention_backward_portable(const AttentionBwdParams& params, void* stream);

// Makes dbias alone, beside the Hopper kernels. `workspace` holds at least as many bytes as the first function says.
int64_t attention_dbias_workspace_portable(const AttentionBwdParams& params);
Status attention_dbias_portable(const AttentionBwdParams& params, void* stream);

namespace attention {

// Run the kernels of one dtype. Each dtype is compiled in a .cu of its own. T: float, float16 or bfloat16.
template <class T> Status run_forward_portable(const AttentionFwdParams& params, void* stream);
template <class T> Status run_backward_portable(const AttentionBwdParams& params, void* stream);
template <class T> Status run_dbias_portable(const AttentionBwdParams& params, void* stream);

}  // namespace attention
}  // namespace warpsmith
