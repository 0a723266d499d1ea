#include "kernels/norm/forward_launch.cuh"

template warpsmith::Status warpsmith::norm::launch_forward<float>(const NormConfig&, const NormForwardParams&, bool,
                                                                  void*);
