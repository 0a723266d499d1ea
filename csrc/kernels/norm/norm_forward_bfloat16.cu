#include "kernels/norm/norm_forward_launch.cuh"

template warpsmith::Status warpsmith::norm::launch_forward<warpsmith::bfloat16>(const NormConfig&,
                                                                                const NormForwardParams&, void*);
