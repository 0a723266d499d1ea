#include "kernels/attention/portable/portable_launch.cuh"

namespace warpsmith::attention {

template Status run_forward_portable<float16>(const AttentionFwdParams&, void*);
template Status run_backward_portable<float16>(const AttentionBwdParams&, void*);
template Status run_dbias_portable<float16>(const AttentionBwdParams&, void*);

}  // namespace warpsmith::attention
