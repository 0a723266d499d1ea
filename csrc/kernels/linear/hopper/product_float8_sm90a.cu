#include "kernels/linear/hopper/product_launch_sm90.cuh"

namespace warpsmith::linear {

Status product_float8_sm90(const ProductParams& params, const ProductKernel& kernel, void* stream) {
  return launch_product<ProductLayout::nt, true>(params, kernel, stream);
}

}  // namespace warpsmith::linear
