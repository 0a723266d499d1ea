#include "kernels/optim/optim.h"

#include <pybind11/stl.h>

#include <vector>

#include "kernels/optim/layerwise.h"
#include "kernels/optim/optim_config.h"
#include "pymodule/bindings.h"
#include "pymodule/problem.h"

namespace py = pybind11;

namespace warpsmith::host {
namespace {

py::dict plan(const char* op, const py::kwargs& given) {
  Problem problem(op, given);
  const int64_t total_elems = problem.integer("total_elems", 0);
  const auto multiprocessors = static_cast<int>(problem.integer("multiprocessors", 1, 132));
  const auto storage = static_cast<Storage>(problem.one_of("storage", kStorageNames));
  problem.refuse_unknown();

  const OptimConfig c = choose_optim(total_elems, multiprocessors, storage);
  return py::dict("threads"_a = c.threads, "vectors_a_thread"_a = c.vectors, "chunk_elems"_a = c.chunk_elems,
                  "why"_a = c.why);
}

#define WARPSMITH_ROW(optimizer, F) {#optimizer, [](const py::kwargs& given) { return plan(#optimizer, given); }},
const RegisterPlanner planners[] = {WARPSMITH_OPTIMIZERS(WARPSMITH_ROW) WARPSMITH_LAYERWISE_OPTIMIZERS(WARPSMITH_ROW)};
#undef WARPSMITH_ROW

// (index, states, hyperparameters, mask of the states that are never negative) of a row.
template <class F> py::tuple row(Optimizer optimizer) {
  const auto split = [](const char* names) { return py::tuple(py::str(names).attr("split")(", ")); };
  return py::make_tuple(static_cast<int>(optimizer), split(F::kStateNames), split(F::kHyperNames), F::kNotNegative);
}

const RegisterBinder registered([](py::module_& m) {
  py::dict rows;
#define WARPSMITH_ROW(optimizer, F) rows[#optimizer] = row<F>(Optimizer::optimizer);
  WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
  WARPSMITH_LAYERWISE_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.attr("OPTIMIZERS") = rows;
  m.attr("LAYERWISE_OPTIMIZERS") = py::frozenset(py::make_tuple("lamb"));
  py::dict storages;  // {name: index}
  for (int i = 0; i < kStorages; ++i) storages[kStorageNames[i]] = i;
  m.attr("OPTIMIZER_STORAGES") = storages;
  py::set casting;  // (optimizer, storage): steps that may write 8-bit floats of weights
#define WARPSMITH_ROW(optimizer, F)                                   \
  for (int i = 0; i < kStorages; ++i)                                 \
    if (casts_weights(Optimizer::optimizer, static_cast<Storage>(i))) \
      casting.add(py::make_tuple(#optimizer, kStorageNames[i]));
  WARPSMITH_OPTIMIZERS(WARPSMITH_ROW)
#undef WARPSMITH_ROW
  m.attr("OPTIMIZERS_THAT_CAST") = py::frozenset(casting);
  m.attr("OPTIMIZER_ROWS") = py::make_tuple(kOptimRowAlign, kOptimMaxChunkElems);
  std::vector<float> maps[2];  // of 8-bit codes, without and with sign
  for (int is_signed = 0; is_signed < 2; ++is_signed)
    for (int code = 0; code < kCodes; ++code) maps[is_signed].push_back(dynamic_value(code, is_signed));
  m.attr("DYNAMIC_MAPS") = py::make_tuple(maps[0], maps[1]);
  m.attr("QUANT_BLOCK") = kQuantBlock;
});

WARPSMITH_REGISTER_ROWS(optim, OPTIM);

}  // namespace
}  // namespace warpsmith::host
