#include "kernels/linear/linear_config.h"
#include "kernels/linear/linear_ops.h"
#include "kernels/linear/product_config.h"
#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

constexpr const char* kProductsOfLayer[] = {"forward", "input_gradient", "weight_gradient", "main_grad"};

// The problem of one of a layer's products.
ProductProblem product_of(const LinearProblem& p, int which) {
  using Layout = ProductLayout;
  using Epilogue = ProductEpilogue;
  if (which == 1) return {p.rows, p.in_features, p.out_features, Layout::nn};
  if (which > 1)
    return {p.out_features, p.in_features, p.rows, Layout::tn, which == 2 ? Epilogue::store : Epilogue::wide};
  const Layout layout = p.derivative ? Layout::nn : Layout::nt;
  const Epilogue epilogue = p.derivative                             ? Epilogue::derivative
                            : p.activation != LinearActivation::none ? Epilogue::activate
                            : p.residual                             ? Epilogue::residual
                                                                     : Epilogue::store;
  return {p.rows, p.out_features, p.in_features, layout, epilogue};
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
  ProductProblem own = product_of(p, which);
  own.asked = problem.flag("own_product", false);
  own.half = problem.dtype_bytes("dtype", "bfloat16") == 2;
  own.aligned = p.aligned;
  own.sm90a_code = p.code_capability == 90;
  own.multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  problem.refuse_unknown();

  const ProductPlan product = choose_product(own);
  if (product.kernel) {
    const ProductTile& t = product.kernel->tile;
    constexpr const char* kEpilogues[] = {"store", "activate", "residual", "derivative", "float32"};
    py::dict d;
    d["path"] = "own";
    d["why"] = product.why;
    d["tile"] = std::to_string(t.rows) + "x" + std::to_string(t.columns) + (product.kernel->splits ? ", split" : "");
    d["cluster"] = std::to_string(t.cluster_rows) + "x" + std::to_string(t.cluster_columns);
    d["order"] = "bands of 8 cluster tiles along the columns";
    d["epilogue"] = kEpilogues[static_cast<int>(product.kernel->epilogue)];
    return d;
  }
  const LinearPlan found = which == 0 ? choose_linear(p) : LinearPlan{false, product.why};
  py::dict d;
  d["path"] = found.epilogue ? "cublas_lt" : "torch";
  d["why"] = found.why;
  if (own.asked) d["own"] = product.why;
  return d;
}

#define WARPSMITH_ROW(op) {#op, [](const py::kwargs& given) { return plan(#op, given); }},
const RegisterPlanner registered[] = {WARPSMITH_LINEAR_OPS(WARPSMITH_ROW)};
#undef WARPSMITH_ROW

const RegisterBinder names([](py::module_& m) {
  py::list all;
  for (const char* name : kLinearActivations) all.append(name);
  m.attr("LINEAR_ACTIVATIONS") = py::tuple(all);
});

WARPSMITH_REGISTER_ROWS(linear, LINEAR);

}  // namespace
}  // namespace warpsmith::host
