#pragma once
#include "common/status.h"

namespace warpsmith {

// The architecture, as 10 * major + minor, of the code that the driver picked for the current device: of its machine
// code, or of the PTX that the driver compiled. It may be less than the device's own (a GPU of sm_90 runs code of sm_80
// where the library holds no other), and it alone says what a kernel can do: clusters, bulk copies and programmatic
// launches are compiled out below sm_90.
//
// One kernel is asked for all: every .cu file of the library is compiled for the same architectures
// (csrc/cmake/ops.cmake). The first call on a device asks the driver, later ones read an atomic. Any thread may call,
// also while a stream is captured.
Status code_capability(int* capability);

// Whether the current device runs the kernels of sm_90a (files named *_sm90a.cu, which have no code for others): their
// own probe is asked, since they are compiled apart. Asked once a device, as above.
bool runs_sm90a_code();

}  // namespace warpsmith
