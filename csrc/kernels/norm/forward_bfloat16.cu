#include "kernels/norm/forward_launch.cuh"

template warpsmith::Status warpsmith::norm::launch_forward<warpsmith::bfloat16>(const NormConfig&,
                                                                                const NormForwardParams&, bool, void*);
