#pragma once
#include <optional>
#include <vector>

#include "bindings/support/device.h"
#include "bindings/support/tensor.h"
#include "kernels/linear/linear.h"

namespace warpsmith {

// Whether own_product() is worth what it needs.
inline bool may_be_own([[maybe_unused]] const Tensor& out) {
#if defined(WARPSMITH_SIM)
  return own_product_may_run();
#elif defined(WARPSMITH_CUDA)
  return out.is_cuda() && own_product_may_run();
#else
  return false;
#endif
}

// False; or refuses, where the caller asks for our product.
inline bool not_own(const char* op, const ProductParams& p, const char* why) {
  if (p.invariant) refuse(op, "batch_invariant", std::string("False (") + why + ")", "True");
  return false;
}

#if defined(WARPSMITH_CUDA) || defined(WARPSMITH_SIM)
// Allocates the workspace of the kernel that is chosen for `p` and launches it; false, if there is none.
inline bool run_own_product(const char* op, const Tensor& out, ProductParams p) {
  ProductPlan plan;
  raise_if_failed(op, product_plan_cuda(p, &plan));
  if (!plan.kernel) return not_own(op, p, plan.why);
  std::optional<Tensor> sums, flags, partials;
  if (p.column_sums) {
    const int64_t sizes[2] = {partial_rows(p.rows), p.columns};
    partials = allocate(op, "partial sums of columns", sizes, 2, aoti_torch_dtype_float32(), out);
    p.partials = static_cast<float*>(partials->mutable_data_ptr());
  }
  if (plan.kernel->splits) {
    sums = allocate_vector(op, "partial sums", plan.sums, aoti_torch_dtype_float32(), out);
    flags = allocate_vector(op, "flags of partial sums", plan.flags, aoti_torch_dtype_int32(), out);
    torch::stable::zero_(*flags);
    p.sums = static_cast<float*>(sums->mutable_data_ptr());
    p.flags = static_cast<int*>(flags->mutable_data_ptr());
  }
  run_on(
      op, out, [&](void* stream) { return product_cuda(p, plan, stream); }, [](const Parallel&) { return Status(); });
  return true;
}
#endif

// out = epilogue(a @ b) by our Hopper kernels; `p` holds what the epilogue needs. Returns false, and has written
// nothing, where the library must multiply: on the CPU, and where choose_product refuses. out is contiguous; float32
// for 16-bit operands means `wide`.
inline bool own_product([[maybe_unused]] const char* op, [[maybe_unused]] const Tensor& out,
                        [[maybe_unused]] const Tensor& a, [[maybe_unused]] const Tensor& b,
                        [[maybe_unused]] ProductParams p = {}) {
  constexpr const char* kCpu = "on the CPU the order of a sum is the library's";
#if defined(WARPSMITH_CUDA) || defined(WARPSMITH_SIM)
  if (p.invariant && !runs_kernels(out)) return not_own(op, p, kCpu);
  if (!p.invariant && !may_be_own(out)) return false;
  const auto by_rows = [](const Tensor& m) { return m.size(1) <= 1 || m.stride(1) == 1; };
  const auto stride = [&](const Tensor& m) { return m.stride(by_rows(m) ? 0 : 1); };
  if (!by_rows(a) && !by_rows(b)) return not_own(op, p, "ours multiplies no two factors whose columns are adjacent");
  p.layout = !by_rows(a) ? ProductLayout::tn : by_rows(b) ? ProductLayout::nn : ProductLayout::nt;
  if ((p.bias || p.up_bias) && p.layout != ProductLayout::nt)
    return not_own(op, p, "ours adds a bias where the rows of the weight are adjacent");
  p.dtype = float_dtype(op, "a", a);
  if (float_dtype(op, "out", out) != p.dtype) p.epilogue = ProductEpilogue::wide;
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  p.a_stride = stride(a);
  p.b_stride = stride(b);
  p.out = out.mutable_data_ptr();
  p.rows = out.size(0);
  p.columns = out.size(1);
  p.inner = a.size(1);
  return run_own_product(op, out, p);
#else
  return not_own(op, p, kCpu);
#endif
}

// The products of several weights [width, K], all in one launch; false, and nothing is written, where that does not run
// or pay. Of one factor x, whose results have the widths: outs[i] = x @ weights[i]^T + biases[i], null for none. Of a
// factor for each weight, of its width: outs[0] = the sum of factors[i] @ weights[i].
inline bool own_products([[maybe_unused]] const char* op, [[maybe_unused]] const std::vector<Tensor>& outs,
                         [[maybe_unused]] const std::vector<Tensor>& factors,
                         [[maybe_unused]] const std::vector<Tensor>& weights,
                         [[maybe_unused]] const std::vector<const void*>& biases = {}) {
#if defined(WARPSMITH_CUDA) || defined(WARPSMITH_SIM)
  if (weights.size() < 2 || weights.size() > kMostSiblings || !may_be_own(outs[0])) return false;
  const bool nt = factors.size() == 1;
  ProductParams p;
  p.layout = nt ? ProductLayout::nt : ProductLayout::nn;
  p.epilogue = ProductEpilogue::siblings;
  p.dtype = float_dtype(op, "x", factors[0]);
  p.rows = factors[0].size(0);
  (nt ? p.inner : p.columns) = weights[0].size(1);
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor &a = factors[nt ? 0 : i], &b = weights[i];
    if (b.size(0) == 0 || b.stride(1) != 1 || b.stride(0) < b.size(1) || a.stride(1) != 1) return false;
    ProductSibling& s = p.siblings[p.sibling_count++];
    s.b = b.const_data_ptr();
    s.b_stride = b.stride(0);
    (nt ? p.columns : p.inner) += s.width = b.size(0);
    (nt ? p.a : s.a) = a.const_data_ptr();
    (nt ? p.a_stride : s.a_stride) = a.stride(0);
    if (nt) s.out = outs[i].mutable_data_ptr(), s.bias = biases[i];
  }
  if (!nt) p.out = outs[0].mutable_data_ptr();
  return run_own_product(op, outs[0], p);
#else
  return false;
#endif
}

}  // namespace warpsmith
