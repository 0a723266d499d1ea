#pragma once
#include <cstdint>

#include "common/status.h"

namespace warpsmith {

// Writes 64-bit words of host memory to device memory inside the arguments of launches: `host` is free again when the
// call returns, nothing waits, no staging buffer has to outlive a copy, and a captured graph carries the words in its
// nodes.
Status table_upload_cuda(const int64_t* host, int64_t* device, int64_t words, void* stream);

}  // namespace warpsmith
