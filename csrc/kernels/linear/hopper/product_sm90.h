#pragma once
#include "kernels/linear/linear.h"

// The Hopper products (sm_90a), a file for each layout and one for 8-bit floats. `kernel` is an entry of kProducts and
// supports the problem.
namespace warpsmith::linear {

Status product_nt_sm90(const ProductParams& params, const ProductKernel& kernel, void* stream);
Status product_nn_sm90(const ProductParams& params, const ProductKernel& kernel, void* stream);
Status product_tn_sm90(const ProductParams& params, const ProductKernel& kernel, void* stream);
Status product_float8_sm90(const ProductParams& params, const ProductKernel& kernel, void* stream);

}  // namespace warpsmith::linear
