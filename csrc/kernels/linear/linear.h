#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/op_list.h"
#include "common/parallel.h"
#include "common/status.h"
#include "kernels/linear/linear_config.h"
#include "kernels/linear/linear_ops.h"
#include "kernels/linear/product_config.h"

// The linear family's own kernel, and who computes its products. Activations are the kernels of
// kernels/activation/activation.h. "real" is float; double for float64.
namespace warpsmith {

WARPSMITH_DEFINE_OPS(LinearOp, WARPSMITH_LINEAR_OPS)

// The bias gradient: sums[c] (+)= sum over rows of x[r, c], in a fixed order, rounded once.
struct ColumnSumsParams {
  const void* x;   // [rows, columns], dtype; rows x_stride apart
  void* sums;      // [columns], sums_dtype
  void* partials;  // [column_sums_slices_cuda(...), columns], float; CUDA alone
  int64_t rows, columns, x_stride;
  bool add;  // to what sums holds; otherwise it is written
  Dtype dtype, sums_dtype;
};

// Into how many slices the rows are cut. Depends on the current device.
Status column_sums_slices_cuda(const ColumnSumsParams& params, int64_t* slices);
Status column_sums_cuda(const ColumnSumsParams& params, void* stream);
Status column_sums_cpu(const ColumnSumsParams& params, const Parallel& parallel);

// Copies what lies above the diagonal of square matrices below it.
struct MirrorParams {
  void* x;  // [batches, n, n], dtype, contiguous
  int64_t batches, n;
  Dtype dtype;
};
Status mirror_cuda(const MirrorParams& params, void* stream);
Status mirror_cpu(const MirrorParams& params, const Parallel& parallel);

// One weight's part of `siblings`. nt: out [rows, width] = a b^T + bias, of b [width, inner] and the a of all. nn: a
// [rows, width] and b [width, columns], whose product is added to the others'.
struct ProductSibling {
  const void *a = nullptr, *b = nullptr;
  int64_t a_stride = 0, b_stride = 0, width = 0;
  void* out = nullptr;         // contiguous
  const void* bias = nullptr;  // [width] or null
};

// out = epilogue(sum over k of a[m, k] b[n, k]) by the Hopper kernels. The rows of a matrix are adjacent or `stride`
// elements apart. 8-bit floats are counted in pairs: `inner` and the strides of a and b are half of their numbers.
struct ProductParams {
  const void *a = nullptr, *b = nullptr;  // dtype or 8-bit floats, as the layout says
  const void* up = nullptr;               // of `gated`: a second b
  int64_t a_stride = 0, b_stride = 0, up_stride = 0;
  void* out = nullptr;                             // [rows, columns], contiguous; float for `wide`
  const void *bias = nullptr, *up_bias = nullptr;  // [columns], dtype; null: none. Layout nt alone
  void* z = nullptr;     // [rows, columns], dtype. `activate` and `gated` write it (null: not kept); others read;
                         // of `symmetric` a symmetric one, or null
  void* up_z = nullptr;  // likewise of `gated`; null where z is
  int64_t z_stride = 0;
  float* sums = nullptr;        // [plan.sums], where sums are split
  int* flags = nullptr;         // [plan.flags], zeros, likewise
  float* partials = nullptr;    // [partial_rows(rows), columns] of `derivative`: workspace of the column sums
  void* column_sums = nullptr;  // [columns], dtype or float; null: not wanted
  Dtype column_sums_dtype = Dtype::float32;
  int64_t rows = 0, columns = 0, inner = 0;
  ProductLayout layout = ProductLayout::nt;
  ProductEpilogue epilogue = ProductEpilogue::store;
  LinearActivation activation = LinearActivation::none;
  bool add = false;           // `wide`
  bool invariant = false;     // by our kernel wherever it can run: a row's bits then depend on its length alone
  float alpha = 1, beta = 0;  // `symmetric`
  int64_t batches = 1;        // likewise: matrices of a, b, z and out, so many elements apart
  int64_t a_apart = 0, b_apart = 0, z_apart = 0;
  Dtype dtype = Dtype::bfloat16;
  // 8-bit floats: a sum is multiplied by both scales before the bias is added; of `blocks` the sum of 128 terms, by
  // their product.
  ProductFactors factors = ProductFactors::halves;
  // Of `one` [1] each, of `rows` [rows] and [columns]; null: 1. Of `blocks` [rows, inner / 64] and [inner / 64,
  // columns], or for squares of 128 columns [columns / 128, inner / 64]; quotients rounded up.
  const float *a_scale = nullptr, *b_scale = nullptr;
  ProductScales scales = ProductScales::one;
  bool b_squares = false;
  bool promotes = false;  // sums of more than 128 terms are made in float32
  // `siblings`: in the place of b, out and bias (nt; columns: the sum of widths), or of a and b (nn; inner: that sum).
  ProductSibling siblings[kMostSiblings] = {};
  int sibling_count = 0;
};

// Whether the kernels multiply the problem, and which. Depends on the current device and on what has been asked for.
Status product_plan_cuda(const ProductParams& params, ProductPlan* plan);
// Fills in the workspace of plan->kernel.
Status product_workspace_cuda(const ProductParams& params, ProductPlan* plan);
Status product_cuda(const ProductParams& params, const ProductPlan& plan, void* stream);

// `store` of 8-bit floats in layout nt, by the Hopper kernels' order of sums and their rounding.
Status float8_product_cpu(const ProductParams& params, const Parallel& parallel);
bool own_product_may_run();

// Fills in what the current device says of a problem: the code that runs there.
Status linear_problem_on_device(LinearProblem* problem);

}  // namespace warpsmith
