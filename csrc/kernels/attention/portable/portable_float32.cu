#include "kernels/attention/portable/portable_launch.cuh"

namespace warpsmith::attention {

template Status run_forward_portable<float>(const AttentionFwdParams&, void*);
template Status run_backward_portable<float>(const AttentionBwdParams&, void*);

}  // namespace warpsmith::attention
