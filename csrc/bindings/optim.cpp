#include "kernels/optim/layerwise.h"
#include "kernels/optim/optim_config.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <variant>
#include <vector>

#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/tensor.h"
#include "bindings/support/tensor_list.h"
#include "common/alignment.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "adamw";
constexpr const char* kTable = "optim_table";
constexpr const char* kPointers = "optim_pointers";
constexpr const char* kStep = "optim_step";

constexpr int64_t kWordsOfExtras = sizeof(StepExtras) / sizeof(int64_t);
constexpr int64_t kWordsOfCasts = sizeof(Float8Rows) / sizeof(int64_t);
constexpr int64_t kWordsATensor = sizeof(OptimTensor) / sizeof(int64_t);

bool same_layout(const Tensor& a, const Tensor& b) {
  const auto sa = a.sizes(), sb = b.sizes(), ta = a.strides(), tb = b.strides();
  if (sa.size() != sb.size()) return false;
  for (size_t i = 0; i < sa.size(); ++i)
    if (sa[i] != sb[i] || (sa[i] > 1 && ta[i] != tb[i])) return false;
  return true;
}

void check_count(const char* op, const char* list, const Tensors& tensors, size_t expected) {
  if (tensors.size() != expected)
    refuse(op, list, std::to_string(expected) + " tensors", std::to_string(tensors.size()));
}

void check_like(const char* op, const char* list, size_t i, const Tensor& t, const Tensor& param,
                std::variant<Dtype, ScalarType> dtype) {
  const std::string argument = item(list, i);
  if (const auto* number = std::get_if<Dtype>(&dtype))
    check_dtype(op, argument.c_str(), t, *number);
  else if (const ScalarType expected = std::get<ScalarType>(dtype); t.scalar_type() != expected)
    refuse(op, argument.c_str(), dtype_text(expected), dtype_text(t.scalar_type()));
  check_same_device(op, argument.c_str(), t, param);
  check_same_shape(op, argument.c_str(), t, param);
  if (!same_layout(t, param)) refuse(op, argument.c_str(), "the strides of its parameter", "others");
}

// Returns the dtype of the parameters of `adamw`; refuses 16-bit parameters.
Dtype wide_dtype(const char* op, const Tensors& params) {
  if (params.empty()) refuse(op, "params", "at least one tensor", "none");
  const Dtype dtype = float_dtype(op, "params[0]", params[0]);
  if (size_bytes(dtype) == 2) refuse(op, "params[0]", "float32, or float64 on the CPU", name(dtype));
  return dtype;
}

void check_params(const char* op, const Tensors& params, Dtype dtype) {
  if (params.empty()) refuse(op, "params", "at least one tensor", "none");
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string argument = item("params", i);
    check_dtype(op, argument.c_str(), params[i], dtype);
    check_same_device(op, argument.c_str(), params[i], params[0]);
    if (!is_dense(params[i])) refuse(op, argument.c_str(), "elements without gaps or overlap", "other strides");
  }
}

void check_scalar(const char* op, const char* argument, const std::optional<Tensor>& t, const Tensor& like) {
  if (!t) return;
  check_dtype(op, argument, *t, Dtype::float32);
  check_same_device(op, argument, *t, like);
  if (t->numel() != 1) refuse(op, argument, "one element", shape_text(*t));
}

// Splits the names of an optimizer's states, which `#__VA_ARGS__` gives as one string with commas.
std::vector<std::string> state_names(Optimizer optimizer) {
  const std::string all = visit_any_optimizer(optimizer, []<class F>() { return F::kStateNames; });
  std::vector<std::string> names;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find(", ", begin), all.size());
    names.push_back(all.substr(begin, end - begin));
    begin = end + 2;
  }
  return names;
}

// Refuses states that the kernels have no code for: a mask that is none of the optimizer's variants, a missing counter
// if the optimizer corrects a bias, or 8-bit codes of other states than states_of_8bit.
void check_has(const char* op, Optimizer optimizer, Storage storage, size_t i, int64_t has) {
  visit_any_optimizer(optimizer, [&]<class F>() {
    constexpr int64_t kStates = (int64_t{1} << F::kStateEnd) - 1, kCounter = kStates + 1;
    const std::string argument = item("has", i);
    const bool known = std::any_of(std::begin(F::kVariants), std::end(F::kVariants),
                                   [&](unsigned variant) { return int64_t{variant} == (has & kStates); });
    if (!known) refuse(op, argument.c_str(), "a set of states of the optimizer", std::to_string(has));
    if (F::kPowers > 0 && !(has & kCounter))
      refuse(op, argument.c_str(), "a step counter", "none: " + std::to_string(has));
    if (is_8bit(storage) && (!states_of_8bit(optimizer) || (has & kStates & ~int64_t{states_of_8bit(optimizer)})))
      refuse(op, argument.c_str(), "states that may be 8-bit codes", std::to_string(has));
    if (has >= 4 * kCounter) refuse(op, argument.c_str(), "bits of states, counter and scales", std::to_string(has));
  });
}

// Indices into the facts of a table, which optim_step checks on the host: address and words of the table, number of its
// tensors, then the optimizer, storage and states (OptimParams::most) that the table was built for.
enum Fact : int { kAddress, kWords, kTensors, kOptimizer, kStorage, kMost, kFactEnd };

// Refuses what a step cannot cast to 8-bit floats.
void check_rows(const char* op, const char* argument, Optimizer optimizer, Storage storage, const Tensor& p,
                int64_t row_elems) {
  const bool fits = p.dim() == 2 && p.is_contiguous() && p.size(1) == row_elems && p.size(0) > 0 &&
                    row_elems % kOptimRowAlign == 0 && row_elems <= kOptimMaxChunkElems &&
                    on_16_bytes(p.const_data_ptr());
  if (!casts_weights(optimizer, storage) || !fits)
    refuse(op, argument, "0, or the columns of a contiguous matrix that the optimizer casts",
           std::to_string(row_elems));
}

// Builds the table of addresses. It holds no references: the caller keeps the tensors alive.
//
// `has`: for each parameter, bit i for state i, the next bit for a step counter, the bit after that for scales.
// `arrays`: for each parameter the states, step counter and scales that it has, in this order, then the array that the
//   storage adds (has_extra).
// `first_elems`: one per parameter if the storage rounds at random, otherwise empty.
// `row_elems`: one per parameter, 0 or the rows that steps may cast to 8-bit floats; or empty.
Tensor build_table(const char* op, Optimizer optimizer, Storage storage, const Tensors& params, const Tensors& arrays,
                   const std::vector<int64_t>& has, const std::vector<int64_t>& groups,
                   const std::vector<int64_t>& first_elems, const std::vector<int64_t>& row_elems = {}) {
  check_params(op, params, param_dtype(storage));
  if (is_layerwise(optimizer) && !layerwise_takes(storage))
    refuse(op, "storage", "float32, float64 or one with masters", kStorageNames[static_cast<int>(storage)]);
  const size_t count = params.size();
  const auto index_of_each = [&](const char* list, const std::vector<int64_t>& indices) {
    if (indices.size() != count) refuse(op, list, std::to_string(count) + " indices", std::to_string(indices.size()));
    for (size_t i = 0; i < count; ++i)
      if (indices[i] < 0 || indices[i] > INT32_MAX)
        refuse(op, item(list, i).c_str(), "an index", std::to_string(indices[i]));
  };
  const bool stochastic = refinement_of(storage) == Refinement::stochastic;
  if (first_elems.size() != (stochastic ? count : 0))
    refuse(op, "first_elems", std::to_string(stochastic ? count : 0) + " indices", std::to_string(first_elems.size()));
  if (!row_elems.empty()) index_of_each("row_elems", row_elems);
  index_of_each("has", has);
  index_of_each("groups", groups);

  const std::vector<std::string> names = state_names(optimizer);
  std::vector<OptimTensor> records(count);
  int64_t total = 0;
  size_t next = 0;
  const auto take = [&]() -> const Tensor& {
    if (next == arrays.size()) refuse(op, "arrays", "one for every bit of has", std::to_string(next));
    return arrays[next++];
  };
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = params[i];
    OptimTensor& record = records[i];
    record.param = p.mutable_data_ptr();
    check_has(op, optimizer, storage, i, has[i]);
    const bool quantized = (has[i] >> (names.size() + 1)) & 1;
    if (quantized && !is_8bit(storage)) refuse(op, item("has", i).c_str(), "no scales", "some");
    for (size_t state = 0; state < names.size(); ++state) {
      if (!((has[i] >> state) & 1)) continue;
      const Tensor& t = take();
      const std::string list = names[state] + "s";
      if (quantized)
        check_like(op, list.c_str(), i, t, p, ScalarType::Byte);
      else
        check_like(op, list.c_str(), i, t, p, state_dtype(storage));
      record.states[state] = t.mutable_data_ptr();
      record.has |= 1u << state;
    }
    if ((has[i] >> names.size()) & 1) {
      const Tensor& t = take();
      check_scalar(op, item("steps", i).c_str(), t, p);
      record.step = static_cast<float*>(t.mutable_data_ptr());
    }
    if (quantized) {
      const Tensor& t = take();
      const std::string argument = item("scales", i);
      check_dtype(op, argument.c_str(), t, Dtype::float32);
      check_same_device(op, argument.c_str(), t, p);
      check_shape(op, argument.c_str(), t, {int64_t{std::popcount(record.has)}, quant_blocks(p.numel())});
      if (!is_dense(t) || (t.size(0) > 1 && t.stride(0) != t.size(1)))
        refuse(op, argument.c_str(), "a contiguous tensor", "other strides");
      record.extra = t.mutable_data_ptr();
    }
    if (has_extra(storage)) {
      const Tensor& t = take();
      if (has_master(storage))
        check_like(op, "masters", i, t, p, Dtype::float32);
      else if (refinement_of(storage) == Refinement::compensated)
        check_like(op, "compensations", i, t, p, Dtype::bfloat16);
      else
        check_like(op, "remainders", i, t, p, ScalarType::Short);
      record.extra = t.mutable_data_ptr();
    }
    if (stochastic) {
      if (!record.step) refuse(op, item("steps", i).c_str(), "a step counter, by which rounding is random", "none");
      record.first_elem = static_cast<uint64_t>(first_elems[i]);
    }
    if (!row_elems.empty()) {
      if (row_elems[i] != 0) check_rows(op, item("row_elems", i).c_str(), optimizer, storage, p, row_elems[i]);
      record.row_elems = static_cast<int32_t>(row_elems[i]);
    }
    record.numel = p.numel();
    record.group = static_cast<int32_t>(groups[i]);
    total += p.numel();
  }
  if (next != arrays.size()) refuse(op, "arrays", std::to_string(next), std::to_string(arrays.size()));
  int32_t chunk_elems = 0;
  run_on(
      op, params[0], [&](void*) { return optim_chunk_elems_cuda(total, storage, &chunk_elems); },
      [&](const Parallel&) {
        chunk_elems = optim_chunk_elems_cpu();
        return Status();
      });
  const std::vector<int64_t> words = tensor_list_words(records, [&](const OptimTensor& t) {
    return t.row_elems == 0 ? chunk_elems : chunk_of_rows(chunk_elems, t.row_elems);
  });
  Tensor table = allocate_words(op, "pointer table", static_cast<int64_t>(words.size()), params[0]);
  write_words(op, words.data(), table);
  return table;
}

// Hyperparameters of one group. A learning rate on the CPU is read here, one on a device by the kernel.
OptimGroup group_of(const char* op, const std::string& argument, const Tensor& lr, const Tensor& like) {
  OptimGroup g{};
  if (lr.numel() != 1) refuse(op, argument.c_str(), "one element", shape_text(lr));
  g.lr_is_double = lr.scalar_type() == ScalarType::Double;
  if (!g.lr_is_double && lr.scalar_type() != ScalarType::Float)
    refuse(op, argument.c_str(), "float32 or float64", dtype_text(lr.scalar_type()));
#ifdef WARPSMITH_SIM
  const bool is_here = lr.dim() == 0;  // any other shape stands for memory of the device
#else
  const bool is_here = lr.is_cpu();
#endif
  if (is_here) {
    const void* at = lr.const_data_ptr();
    g.lr = g.lr_is_double ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
  } else {
    check_same_device(op, argument.c_str(), lr, like);
    g.lr_device = lr.const_data_ptr();
  }
  return g;
}

// Fills in what a launch takes from the tensors, then launches once per kOptimMaxGroups groups.
void run(const char* op, OptimParams& p, const Tensor& table, const Tensor& pointers,
         const std::vector<OptimGroup>& groups, const std::vector<uint64_t>& seeds,
         const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf) {
  check_scalar(op, "grad_scale", grad_scale, table);
  check_scalar(op, "found_inf", found_inf, table);
  const int64_t count = pointers.numel();
  int64_t* words = static_cast<int64_t*>(table.mutable_data_ptr());
  p.tensors = reinterpret_cast<OptimTensor*>(words);
  p.chunks = reinterpret_cast<const ListChunk*>(words + count * kWordsATensor);
  p.grads = static_cast<const void* const*>(pointers.const_data_ptr());
  p.grad_scale = grad_scale ? static_cast<const float*>(grad_scale->const_data_ptr()) : nullptr;
  p.found_inf = found_inf ? static_cast<const float*>(found_inf->const_data_ptr()) : nullptr;
  p.tensor_count = count;
  p.chunk_count = table.numel() - count * kWordsATensor;
  Tensor scratch;
  if (is_layerwise(p.optimizer))
    scratch = allocate_vector(op, "sums of squares", 2 * p.chunk_count + count, aoti_torch_dtype_float64(), table);
  for (size_t first = 0; first < groups.size(); first += kOptimMaxGroups) {
    p.first_group = static_cast<int32_t>(first);
    p.group_count = static_cast<int32_t>(std::min<size_t>(kOptimMaxGroups, groups.size() - first));
    std::copy_n(groups.begin() + static_cast<int64_t>(first), p.group_count, p.groups);
    std::copy_n(seeds.begin() + static_cast<int64_t>(first), p.group_count, p.seeds);
    if (is_layerwise(p.optimizer)) {
      LayerwiseParams layerwise{p, static_cast<double*>(scratch.mutable_data_ptr()), nullptr};
      layerwise.ratios = layerwise.partials + 2 * p.chunk_count;
      run_on<layerwise_cuda, layerwise_cpu>(op, table, layerwise);
      continue;
    }
    run_on(
        op, table,
        [&](void* stream) {
          return p.mixed_grads || does_more(p) ? optim_runtime_dtypes_cuda(p, stream) : optim_cuda(p, stream);
        },
        [&](const Parallel& threads) { return optim_cpu(p, threads); });
  }
}

Optimizer optimizer_of(const char* op, int64_t index) {
#define WARPSMITH_ROW(optimizer, F) +1
  constexpr int64_t kCount = 0 WARPSMITH_OPTIMIZERS(WARPSMITH_ROW) WARPSMITH_LAYERWISE_OPTIMIZERS(WARPSMITH_ROW);
#undef WARPSMITH_ROW
  if (index < 0 || index >= kCount) refuse(op, "optimizer", "an index of a row", std::to_string(index));
  return static_cast<Optimizer>(index);
}

Storage storage_of(const char* op, int64_t index) {
  if (index < 0 || index >= kStorages) refuse(op, "storage", "an index of a storage", std::to_string(index));
  return static_cast<Storage>(index);
}

void check_words(const char* op, const char* argument, const Tensor& t) {
  if (t.scalar_type() != ScalarType::Long) refuse(op, argument, "int64", dtype_text(t.scalar_type()));
  if (t.dim() != 1 || (t.numel() > 1 && t.stride(0) != 1))
    refuse(op, argument, "one dimension of adjacent elements", shape_text(t));
}

void check_column(const char* op, const char* argument, const Tensor& t, int64_t words, const Tensor& table) {
  check_words(op, argument, t);
  check_same_device(op, argument, t, table);
  if (t.numel() != words) refuse(op, argument, std::to_string(words) + " words", std::to_string(t.numel()));
}

std::tuple<Tensor, std::vector<int64_t>> optim_table(int64_t optimizer, int64_t storage, Tensors params, Tensors arrays,
                                                     std::vector<int64_t> has, std::vector<int64_t> groups,
                                                     std::vector<int64_t> first_elems, std::vector<int64_t> row_elems) {
  const Tensor table = build_table(kTable, optimizer_of(kTable, optimizer), storage_of(kTable, storage), params, arrays,
                                   has, groups, first_elems, row_elems);
  int64_t most = 0;
  const size_t states = state_names(static_cast<Optimizer>(optimizer)).size();
  for (const int64_t bits : has) most |= bits & ((int64_t{1} << states) - 1);
  std::vector<int64_t> facts(kFactEnd);
  facts[kAddress] = reinterpret_cast<int64_t>(table.const_data_ptr());
  facts[kWords] = table.numel();
  facts[kTensors] = static_cast<int64_t>(params.size());
  facts[kOptimizer] = optimizer;
  facts[kStorage] = storage;
  facts[kMost] = most;
  return {table, facts};
}

void optim_pointers(Tensor pointers, Tensor values) {
  check_words(kPointers, "pointers", pointers);
  check_words(kPointers, "values", values);
  check_same_shape(kPointers, "values", values, pointers);
  if (!values.is_cpu()) refuse(kPointers, "values", "a CPU tensor", device_text(values));
  write_words(kPointers, static_cast<const int64_t*>(values.const_data_ptr()), pointers);
}

// facts: what optim_table returned with the table.
// constants: float64 [groups, hyperparameters + 2] on the CPU: the values in the order of their names, then maximize,
//   then the seed of random rounding, a whole number below 2^53.
// device_constants: the same on the table's device. The kernel reads its values in place of those of `constants`, at
//   each replay of a CUDA graph too. maximize and seed always come from `constants`.
// mixed_grads: whether entries of `pointers` may hold a dtype (kernels/optim/gradient.h).
// extras: a StepExtras for each tensor (kernels/optim/step_extras.h).
// zero_grads: the step writes to the gradients.
// casts: a Float8Rows for each tensor (common/float8_scale.h); not beside mixed_grads, extras or zero_grads.
void optim_step(Tensor table, std::vector<int64_t> facts, Tensor pointers, Tensors lr, Tensor constants,
                std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                std::optional<Tensor> device_constants, bool mixed_grads, std::optional<Tensor> extras,
                double ema_weight, bool zero_grads, std::optional<Tensor> casts) {
  check_words(kStep, "table", table);
  check_words(kStep, "pointers", pointers);
  check_same_device(kStep, "pointers", pointers, table);
  if (facts.size() != kFactEnd)
    refuse(kStep, "facts", std::to_string(kFactEnd) + " numbers", std::to_string(facts.size()));
  if (facts[kAddress] != reinterpret_cast<int64_t>(table.const_data_ptr()) || facts[kWords] != table.numel())
    refuse(kStep, "table", "that of the facts, of " + std::to_string(facts[kWords]) + " words",
           "another, of " + std::to_string(table.numel()));
  if (pointers.numel() != facts[kTensors])
    refuse(kStep, "pointers", std::to_string(facts[kTensors]) + " addresses", std::to_string(pointers.numel()));
  OptimParams p{};
  p.optimizer = optimizer_of(kStep, facts[kOptimizer]);
  p.storage = storage_of(kStep, facts[kStorage]);
  p.most = static_cast<uint32_t>(facts[kMost]);
  p.mixed_grads = mixed_grads;
  p.ema_weight = ema_weight;
  p.zero_grads = zero_grads;
  if (extras) {
    check_column(kStep, "extras", *extras, kWordsOfExtras * facts[kTensors], table);
    p.extras = static_cast<const StepExtras*>(extras->const_data_ptr());
  }
  if (casts) {
    check_column(kStep, "casts", *casts, kWordsOfCasts * facts[kTensors], table);
    if (!casts_weights(p.optimizer, p.storage) || p.most != AdamW::kVariants[0] || mixed_grads || does_more(p))
      refuse(kStep, "casts", "none with this optimizer, storage, states, gradients or extras", "some");
    p.casts = static_cast<const Float8Rows*>(casts->const_data_ptr());
  }
  if (!(ema_weight >= 0 && ema_weight <= 1))
    refuse(kStep, "ema_weight", "a number from 0 to 1", std::to_string(ema_weight));
  if (does_more(p) && (is_8bit(p.storage) || is_layerwise(p.optimizer)))
    refuse(kStep, extras ? "extras" : "zero_grads", "none with 8-bit states or a layerwise optimizer", "some");
  const int64_t values = visit_any_optimizer(p.optimizer, []<class F>() { return int64_t{F::kHyperEnd}; });
  check_float64(kStep, "constants", constants);
  check_shape(kStep, "constants", constants, {static_cast<int64_t>(lr.size()), values + 2});
  if (!constants.is_cpu()) refuse(kStep, "constants", "a CPU tensor", device_text(constants));
  const double* device_row = nullptr;
  if (device_constants) {
    check_float64(kStep, "device_constants", *device_constants);
    check_same_shape(kStep, "device_constants", *device_constants, constants);
    check_same_device(kStep, "device_constants", *device_constants, table);
    if (!device_constants->is_contiguous()) refuse(kStep, "device_constants", "a contiguous tensor", "other strides");
    device_row = static_cast<const double*>(device_constants->const_data_ptr());
  }
  const Tensor rows = as_contiguous(constants);
  const double* row = static_cast<const double*>(rows.const_data_ptr());
  std::vector<OptimGroup> groups;
  std::vector<uint64_t> seeds;
  for (size_t i = 0; i < lr.size(); ++i, row += values + 2) {
    OptimGroup g = group_of(kStep, item("lr", i), lr[i], table);
    std::copy_n(row, values, g.values);
    if (device_row) g.values_device = device_row + static_cast<int64_t>(i) * (values + 2);
    g.maximize = row[values] != 0;
    groups.push_back(g);
    seeds.push_back(static_cast<uint64_t>(row[values + 1]));
  }
  run(kStep, p, table, pointers, groups, seeds, grad_scale, found_inf);
}

void adamw(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs, Tensors steps,
           Tensor lr, double beta1, double beta2, double eps, double weight_decay, bool maximize,
           std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  const Dtype dtype = wide_dtype(kOp, params);
  check_params(kOp, params, dtype);
  const size_t count = params.size();
  check_count(kOp, "grads", grads, count);
  std::vector<int64_t> addresses(count);
  for (size_t i = 0; i < count; ++i) {
    check_like(kOp, "grads", i, grads[i], params[i], dtype);
    addresses[i] = grads[i].numel() > 0 ? reinterpret_cast<int64_t>(grads[i].const_data_ptr()) : kNoElements;
  }
  const auto number = [&](const char* argument, double value, double end) {
    if (!(value >= 0 && value < end))
      refuse(kOp, argument, end == HUGE_VAL ? "a number >= 0" : "a number in [0, 1)", std::to_string(value));
  };
  number("beta1", beta1, 1);
  number("beta2", beta2, 1);
  number("eps", eps, HUGE_VAL);
  number("weight_decay", weight_decay, HUGE_VAL);
  OptimGroup g = group_of(kOp, "lr", lr, params[0]);
  g.values[AdamW::beta1] = beta1;
  g.values[AdamW::beta2] = beta2;
  g.values[AdamW::eps] = eps;
  g.values[AdamW::weight_decay] = weight_decay;
  g.maximize = maximize;
  check_scalar(kOp, "grad_scale", grad_scale, params[0]);
  check_scalar(kOp, "found_inf", found_inf, params[0]);
  check_count(kOp, "exp_avgs", exp_avgs, count);
  check_count(kOp, "exp_avg_sqs", exp_avg_sqs, count);
  if (!max_exp_avg_sqs.empty()) check_count(kOp, "max_exp_avg_sqs", max_exp_avg_sqs, count);
  check_count(kOp, "steps", steps, count);
  Tensors arrays;
  for (size_t i = 0; i < count; ++i) {
    arrays.push_back(exp_avgs[i]);
    arrays.push_back(exp_avg_sqs[i]);
    if (!max_exp_avg_sqs.empty()) arrays.push_back(max_exp_avg_sqs[i]);
    arrays.push_back(steps[i]);
  }
  OptimParams p{};
  p.optimizer = Optimizer::adamw;
  p.storage = dtype == Dtype::float64 ? Storage::float64 : Storage::float32;
  p.most = AdamW::kVariants[max_exp_avg_sqs.empty() ? 0 : 1];
  const Tensor table = build_table(kOp, p.optimizer, p.storage, params, arrays,
                                   std::vector<int64_t>(count, int64_t{p.most} | int64_t{1} << AdamW::kStateEnd),
                                   std::vector<int64_t>(count, 0), {});
  const Tensor pointers = allocate_words(kOp, "gradient addresses", static_cast<int64_t>(count), params[0]);
  write_words(kOp, addresses.data(), pointers);
  run(kOp, p, table, pointers, {g}, {0}, grad_scale, found_inf);
}

WARPSMITH_OPS(m) {
  m.add(
      "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] "
      "max_exp_avg_sqs, Tensor(e!)[] steps, Tensor lr, float beta1, float beta2, float eps, float weight_decay, bool "
      "maximize, Tensor? grad_scale, Tensor? found_inf) -> ()",
      TORCH_BOX(&adamw));
  m.add(
      "optim_table(int optimizer, int storage, Tensor[] params, Tensor[] arrays, int[] has, int[] groups, int[] "
      "first_elems, int[] row_elems=[]) -> (Tensor table, int[] facts)",
      TORCH_BOX(&optim_table));
  m.add("optim_pointers(Tensor(a!) pointers, Tensor values) -> ()", TORCH_BOX(&optim_pointers));
  // optim_step also writes to the arrays that the table points to. A schema cannot say so: it is for eager code only.
  m.add(
      "optim_step(Tensor(a!) table, int[] facts, Tensor pointers, Tensor[] lr, Tensor constants, Tensor? grad_scale, "
      "Tensor? found_inf, Tensor? device_constants=None, bool mixed_grads=False, Tensor? extras=None, float "
      "ema_weight=0.0, bool zero_grads=False, Tensor? casts=None) -> ()",
      TORCH_BOX(&optim_step));
}

}  // namespace
}  // namespace warpsmith
