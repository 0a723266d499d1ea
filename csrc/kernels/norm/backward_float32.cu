#include "kernels/norm/backward_launch.cuh"

template warpsmith::Status warpsmith::norm::launch_backward<float>(const NormConfig&, const NormBackwardParams&, void*);
