#include "kernels/norm/backward_launch.cuh"

template warpsmith::Status warpsmith::norm::launch_backward<warpsmith::bfloat16>(const NormConfig&,
                                                                                 const NormBackwardParams&, void*);
