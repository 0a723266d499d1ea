#include <algorithm>
#include <string>

#include "common/alignment.h"
#include "common/code_capability.h"
#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/linear/hopper/product_sm90.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/own_product.h"
#include "tiles/sum_partials.cuh"

// Chooses the kernel of a product, where the library contains the Hopper kernels (sm_90a).
namespace warpsmith {
namespace {

#if defined(WARPSMITH_SM90A) || defined(WARPSMITH_SIM)
constexpr bool kHopperProducts = true;
#else
constexpr bool kHopperProducts = false;  // code that depends on it refers to functions that do not exist
#endif

bool is_aligned(const ProductParams& p) {
  const bool tn = p.layout == ProductLayout::tn, nt = p.layout == ProductLayout::nt;
  const auto rows_fit = [&](const void* base, int64_t stride, int64_t rows) {
    return rows_on_16_bytes(base, stride, rows, p.dtype);
  };
  const auto siblings_fit = [&] {
    for (const ProductSibling& s : p.siblings)
      if (!rows_fit(s.a, s.a_stride, p.rows) || !rows_fit(s.b, s.b_stride, s.width) || !on_16_bytes(s.bias) ||
          !rows_fit(s.out, s.width, p.rows) || (s.bias && s.width % 8 != 0))
        return false;
    return true;
  };
  return siblings_fit() && rows_fit(p.a, p.a_stride, tn ? p.inner : p.rows) &&
         rows_fit(p.b, p.b_stride, nt ? p.columns : p.inner) &&
         rows_on_16_bytes(p.out, p.columns, p.rows, p.epilogue == ProductEpilogue::wide ? Dtype::float32 : p.dtype) &&
         rows_fit(p.z, p.z_stride, p.rows) && rows_fit(p.up, p.up_stride, p.columns) &&
         rows_fit(p.up_z, p.z_stride, p.rows) && rows_on_16_bytes(p.a, p.a_apart, p.batches, p.dtype) &&
         rows_on_16_bytes(p.b, p.b_apart, p.batches, p.dtype) && rows_on_16_bytes(p.z, p.z_apart, p.batches, p.dtype) &&
         rows_on_16_bytes(p.out, p.rows * p.columns, p.batches, p.dtype) && on_16_bytes(p.bias) &&
         on_16_bytes(p.up_bias) && (p.scales == ProductScales::one || on_16_bytes(p.b_scale)) &&
         ((!p.bias && !p.up_bias && !p.b_scale && !hands_over(p.epilogue)) || p.columns % 8 == 0);
}

Status multiply(const ProductParams& p, const ProductKernel& kernel, void* stream) {
  if constexpr (kHopperProducts) {
    if (kernel.float8()) return linear::product_float8_sm90(p, kernel, stream);
    switch (kernel.layout) {
      case ProductLayout::nt: return linear::product_nt_sm90(p, kernel, stream);
      case ProductLayout::nn: return linear::product_nn_sm90(p, kernel, stream);
      case ProductLayout::tn: return linear::product_tn_sm90(p, kernel, stream);
    }
  }
  return Status::unsupported("no Hopper kernels in this build");
}

}  // namespace

bool own_product_may_run() { return kHopperProducts && own_product_asked() != kNeverOwn; }

Status product_plan_cuda(const ProductParams& p, ProductPlan* plan) {
  ProductProblem problem{p.rows, p.columns, p.inner, p.layout, p.epilogue};
  const int how = own_product_asked();
  problem.asked = p.invariant              ? OwnProduct::always
                  : !own_product_may_run() ? OwnProduct::never
                  : how == kOwnWhereItPays ? OwnProduct::automatic
                                           : OwnProduct::always;
  problem.tile_rows = how > kOwnWhereItPays ? how : 0;
  problem.batches = p.batches;
  problem.factors = p.factors;
  problem.promotes = p.promotes;
  problem.scales = p.scales;
  for (int i = 0; i < p.sibling_count; ++i) problem.widths[i] = p.siblings[i].width;
  if (problem.asked != OwnProduct::never) {
    DeviceProperties device;
    WARPSMITH_RETURN_IF_FAILED(device_properties(device));
    problem.multiprocessors = device.multiprocessors;
    problem.sm90a_code = runs_sm90a_code();
    problem.half = p.dtype == Dtype::bfloat16 || p.dtype == Dtype::float16;
    problem.aligned = problem.half && is_aligned(p);
    problem.rival = p.dtype == Dtype::bfloat16 && p.activation == LinearActivation::gelu_tanh;
    problem.kept = p.z != nullptr;
  }
  *plan = choose_product(problem);
  return product_workspace_cuda(p, plan);
}

Status product_workspace_cuda(const ProductParams& p, ProductPlan* plan) {
  if (!plan->kernel || !plan->kernel->splits) return {};
  DeviceProperties device;
  WARPSMITH_RETURN_IF_FAILED(device_properties(device));
  const ProductTile& t = plan->kernel->tile;
  const int64_t clusters = product_clusters(t, device.multiprocessors);
  const int64_t shares = clusters + product_units(t, p.rows, p.columns) % clusters;  // linear::ProductShares
  plan->sums = shares * t.cluster() * t.rows * t.columns;
  plan->flags = 1 + shares * t.cluster() * kConsumerWarps;
  return {};
}

Status product_cuda(const ProductParams& p, const ProductPlan& plan, void* stream) {
  ++own_products_launched();
  WARPSMITH_RETURN_IF_FAILED(multiply(p, *plan.kernel, stream));
  if (!p.column_sums) return {};
  return visit_cuda_dtype(p.column_sums_dtype, [&]<class W>() {
    return tiles::launch_sum_partials<W>(p.partials, p.column_sums, partial_rows(p.rows), p.columns, stream);
  });
}

}  // namespace warpsmith
