#include "kernels/attention/portable/portable_launch.cuh"

namespace warpsmith::attention {

template Status run_forward_portable<bfloat16>(const AttentionFwdParams&, void*);
template Status run_backward_portable<bfloat16>(const AttentionBwdParams&, void*);
template Status run_dbias_portable<bfloat16>(const AttentionBwdParams&, void*);

}  // namespace warpsmith::attention
