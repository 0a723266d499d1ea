#include <string_view>
#include <utility>

#include "kernels/linear/linear_config.h"
#include "kernels/linear/linear_ops.h"
#include "kernels/linear/product_config.h"
#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

constexpr const char* kScalings[] = {"row", "tensor", "block"};

constexpr const char* kProductsOfLayer[] = {"forward", "input_gradient", "weight_gradient", "main_grad"};

// The problem of one of a layer's products.
ProductProblem product_of(const LinearProblem& p, int which, bool gated) {
  using Layout = ProductLayout;
  using Epilogue = ProductEpilogue;
  if (which == 1) return {p.rows, p.in_features, p.out_features, Layout::nn};
  if (which > 1)
    return {p.out_features, p.in_features, p.rows, Layout::tn, which == 2 ? Epilogue::store : Epilogue::wide};
  const Layout layout = p.derivative ? Layout::nn : Layout::nt;
  const Epilogue epilogue = p.derivative                             ? Epilogue::derivative
                            : gated                                  ? Epilogue::gated
                            : p.activation != LinearActivation::none ? Epilogue::activate
                            : p.residual                             ? Epilogue::residual
                                                                     : Epilogue::store;
  return {p.rows, p.out_features, p.in_features, layout, epilogue};
}

py::dict described(const ProductPlan& product) {
  const ProductTile& t = product.kernel->tile;
  constexpr const char* kEpilogues[] = {"store", "activate", "residual",  "derivative",
                                        "gated", "float32",  "symmetric", "siblings"};
  py::dict d;
  d["path"] = "own";
  d["why"] = product.why;
  d["tile"] = std::to_string(t.rows) + "x" + std::to_string(t.columns) + (product.kernel->splits ? ", split" : "");
  d["cluster"] = std::to_string(t.cluster_rows) + "x" + std::to_string(t.cluster_columns);
  d["order"] = "bands of 8 cluster tiles along the columns";
  d["epilogue"] = kEpilogues[static_cast<int>(product.kernel->epilogue)];
  return d;
}

py::dict plan(const char* op, const py::kwargs& given) {
  Problem problem(op, given);
  LinearProblem p;
  p.rows = problem.integer("rows", 0);
  p.in_features = problem.integer("in_features", 0);
  p.out_features = problem.integer("out_features", 0);
  p.activation = static_cast<LinearActivation>(problem.one_of("activation", kLinearActivations));
  problem.dtype_bytes("dtype", "bfloat16");
  p.bfloat16 = problem.text("dtype", "bfloat16") == "bfloat16";
  p.derivative = problem.flag("derivative", false);
  p.residual = problem.flag("residual", false);
  p.aligned = problem.flag("aligned", true);
  p.library = problem.flag("library", true);
  p.code_capability = static_cast<int>(problem.integer("code_capability", 80, 90));
  const int which = problem.one_of("product", kProductsOfLayer);
  const bool gated = std::string_view(op) == "gated_linear" && !p.derivative;
  ProductProblem own = product_of(p, which, gated);
  own.asked = static_cast<OwnProduct>(problem.one_of("own_product", kOwnProduct));
  own.kept = problem.flag("kept", false);
  own.rival = p.bfloat16 && p.library && p.activation == LinearActivation::gelu_tanh;
  own.half = problem.dtype_bytes("dtype", "bfloat16") == 2;
  own.aligned = p.aligned;
  own.sm90a_code = p.code_capability == 90;
  own.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  const ProductPlan product = choose_product(own);
  if (product.kernel) return described(product);
  const LinearPlan found = which > 0 ? LinearPlan{false, product.why}
                           : gated   ? LinearPlan{false, "torch's products, then our kernel: no library gates"}
                                     : choose_linear(p);
  py::dict d;
  d["path"] = found.epilogue ? "cublas_lt" : "torch";
  d["why"] = found.why;
  if (own.asked != OwnProduct::never) d["own"] = product.why;
  return d;
}

py::dict plan_scaled(const py::kwargs& given) {
  Problem problem("scaled_linear", given);
  const int64_t rows = problem.integer("rows", 0), in = problem.integer("in_features", 0),
                out = problem.integer("out_features", 0);
  const int scaling = problem.one_of("scaling", kScalings);
  const auto how = static_cast<ScaledAccumulate>(problem.one_of("accumulate", kScaledAccumulate));
  const bool emulate = problem.flag("emulate", false);
  const int64_t capability = problem.integer("code_capability", 80, 90);
  ProductProblem own{rows, out, ceil_div(in, int64_t{2})};  // pairs
  own.asked = static_cast<OwnProduct>(problem.one_of("own_product", kOwnProduct));
  own.half = problem.dtype_bytes("dtype", "bfloat16") == 2;
  own.sm90a_code = capability == 90;
  own.factors = ProductFactors::e4m3;
  own.promotes = !accumulates_fast(how, in, false);
  own.scales = scaling == 0 ? ProductScales::rows : scaling == 1 ? ProductScales::one : ProductScales::blocks;
  problem.refuse_unknown();

  const bool blocks = scaling == 2, runs = scaling == 1 ? capability >= 89 : capability == 90;
  const ProductPlan product = choose_product(own);
  const bool is_own = product.kernel && !emulate;
  py::dict d = is_own ? described(product) : py::dict();
  if (!is_own) d["path"] = emulate ? "float32" : runs ? "_scaled_mm" : "none";
  const std::pair<const char*, int64_t> terms[] = {{"forward", in}, {"dgrad", out}, {"wgrad", rows}};
  for (const auto& [product, count] : terms)
    d[product] = emulate || !accumulates_fast(how, count, blocks) ? "float32" : "fast";
  if (is_own) return d;
  d["why"] = emulate ? "dequantized values, multiplied in float32"
             : runs  ? "torch's product of 8-bit floats; sums by the number of their terms"
                     : "cuBLASLt has row and block scales on sm_90 alone, and 8-bit products from sm_89 on";
  return d;
}

py::dict plan_symmetric(const py::kwargs& given) {
  Problem problem("matmul_symmetric", given);
  ProductProblem p{.epilogue = ProductEpilogue::symmetric};
  p.rows = p.columns = problem.integer("rows", 0);
  p.inner = problem.integer("inner", 0);
  p.batches = problem.integer("batches", 0, 1);
  p.half = problem.dtype_bytes("dtype", "bfloat16") == 2;
  p.aligned = problem.flag("aligned", true) && p.rows % 8 == 0;
  p.asked = static_cast<OwnProduct>(problem.one_of("own_product", kOwnProduct));
  p.sm90a_code = problem.integer("code_capability", 80, 90) == 90;
  p.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  const ProductPlan product = choose_product(p);
  if (product.kernel) return described(product);
  py::dict d;
  d["path"] = "torch";
  d["why"] = product.why;
  return d;
}

py::dict plan_of(const char* op, const py::kwargs& given) {
  const std::string_view name = op;
  return name == "scaled_linear"      ? plan_scaled(given)
         : name == "matmul_symmetric" ? plan_symmetric(given)
                                      : plan(op, given);
}

#define WARPSMITH_ROW(op) {#op, [](const py::kwargs& given) { return plan_of(#op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_LINEAR_OPS(WARPSMITH_ROW)};
#undef WARPSMITH_ROW

const RegisterBinder names([](py::module_& m) {
  py::list all;
  for (const char* name : kLinearActivations) all.append(name);
  m.attr("LINEAR_ACTIVATIONS") = py::tuple(all);
  py::dict flags;
#define WARPSMITH_ROW(flag, bit) flags[#flag] = bit;
  WARPSMITH_SCALED_FLAGS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.attr("SCALED_FLAGS") = flags;
});

WARPSMITH_REGISTER_ROWS(linear, LINEAR);

}  // namespace
}  // namespace warpsmith::host
