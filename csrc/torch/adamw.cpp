#include "kernels/optim/adamw.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "torch/support/device.h"
#include "torch/support/library.h"
#include "torch/support/tensor.h"

namespace warpsmith {
namespace {

using Tensors = std::vector<Tensor>;

constexpr const char* kOp = "adamw";
constexpr const char* kTable = "adamw_table";
constexpr const char* kPointers = "adamw_pointers";
constexpr const char* kStep = "adamw_step";

constexpr int64_t kWordsATensor = sizeof(AdamWTensor) / sizeof(int64_t);

// What stands for the address of a gradient without elements: such a tensor still counts its steps, and torch gives it
// no address of its own.
constexpr int64_t kNoElements = 16;

std::string item(const char* list, size_t i) { return std::string(list) + "[" + std::to_string(i) + "]"; }

// Elements fill their memory without gaps or overlap, in any order of the dimensions.
bool is_dense(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

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

void check_like(const char* op, const char* list, size_t i, const Tensor& t, const Tensor& param, Dtype dtype) {
  const std::string argument = item(list, i);
  check_dtype(op, argument.c_str(), t, dtype);
  check_same_device(op, argument.c_str(), t, param);
  check_same_shape(op, argument.c_str(), t, param);
  if (!same_layout(t, param)) refuse(op, argument.c_str(), "the strides of its parameter", "others");
}

Dtype check_params(const char* op, const Tensors& params) {
  if (params.empty()) refuse(op, "params", "at least one tensor", "none");
  const Dtype dtype = float_dtype(op, "params[0]", params[0]);
  if (size_bytes(dtype) == 2) refuse(op, "params[0]", "float32, or float64 on the CPU", name(dtype));
  for (size_t i = 0; i < params.size(); ++i) {
    const std::string argument = item("params", i);
    check_dtype(op, argument.c_str(), params[i], dtype);
    check_same_device(op, argument.c_str(), params[i], params[0]);
    if (!is_dense(params[i])) refuse(op, argument.c_str(), "elements without gaps or overlap", "other strides");
  }
  return dtype;
}

void check_scalar(const char* op, const char* argument, const std::optional<Tensor>& t, const Tensor& like) {
  if (!t) return;
  check_dtype(op, argument, *t, Dtype::float32);
  check_same_device(op, argument, *t, like);
  if (t->numel() != 1) refuse(op, argument, "one element", shape_text(*t));
}

Tensor allocate_words(const char* op, const char* argument, int64_t count, const Tensor& like) {
  return allocate_vector(op, argument, count, aoti_torch_dtype_int64(), like);
}

void write_words(const char* op, const int64_t* host, const Tensor& to) {
  const int64_t count = to.numel();
  int64_t* words = static_cast<int64_t*>(to.mutable_data_ptr());
  run_on(
      op, to, [&](void* stream) { return adamw_upload_cuda(host, words, count, stream); },
      [&](const Parallel&) {
        std::copy_n(host, count, words);
        return Status();
      });
}

// A table holds addresses, not references: whoever keeps it keeps the tensors.
Tensor build_table(const char* op, const Tensors& params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                   const Tensors& max_exp_avg_sqs, const Tensors& steps, const std::vector<int64_t>& groups) {
  const Dtype dtype = check_params(op, params);
  const size_t count = params.size();
  check_count(op, "exp_avgs", exp_avgs, count);
  check_count(op, "exp_avg_sqs", exp_avg_sqs, count);
  if (!max_exp_avg_sqs.empty()) check_count(op, "max_exp_avg_sqs", max_exp_avg_sqs, count);
  check_count(op, "steps", steps, count);
  if (groups.size() != count) refuse(op, "groups", std::to_string(count) + " indices", std::to_string(groups.size()));

  std::vector<AdamWTensor> records(count);
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    const Tensor& p = params[i];
    check_like(op, "exp_avgs", i, exp_avgs[i], p, dtype);
    check_like(op, "exp_avg_sqs", i, exp_avg_sqs[i], p, dtype);
    const bool amsgrad = !max_exp_avg_sqs.empty() && max_exp_avg_sqs[i].numel() > 0;
    if (amsgrad) check_like(op, "max_exp_avg_sqs", i, max_exp_avg_sqs[i], p, dtype);
    check_scalar(op, item("steps", i).c_str(), steps[i], p);
    if (groups[i] < 0 || groups[i] > INT32_MAX)
      refuse(op, item("groups", i).c_str(), "an index", std::to_string(groups[i]));
    records[i] = {p.mutable_data_ptr(),
                  exp_avgs[i].mutable_data_ptr(),
                  exp_avg_sqs[i].mutable_data_ptr(),
                  amsgrad ? max_exp_avg_sqs[i].mutable_data_ptr() : nullptr,
                  static_cast<float*>(steps[i].mutable_data_ptr()),
                  p.numel(),
                  static_cast<int32_t>(groups[i]),
                  0,
                  0,
                  0};
    total += p.numel();
  }
  int32_t chunk_elems = 0;
  run_on(
      op, params[0], [&](void*) { return adamw_chunk_elems_cuda(total, &chunk_elems); },
      [&](const Parallel&) {
        chunk_elems = adamw_chunk_elems_cpu();
        return Status();
      });
  const std::vector<int64_t> words = tensor_list_words(records, chunk_elems);
  Tensor table = allocate_words(op, "pointer table", static_cast<int64_t>(words.size()), params[0]);
  write_words(op, words.data(), table);
  return table;
}

// Hyperparameters of one group. A learning rate on the CPU is read here, one on a device by the kernel.
AdamWGroup group_of(const char* op, const std::string& argument, const Tensor& lr, const Tensor& like) {
  AdamWGroup g{};
  if (lr.numel() != 1) refuse(op, argument.c_str(), "one element", shape_text(lr));
  g.lr_is_double = lr.scalar_type() == ScalarType::Double;
  if (!g.lr_is_double && lr.scalar_type() != ScalarType::Float)
    refuse(op, argument.c_str(), "float32 or float64", dtype_text(lr.scalar_type()));
  if (lr.is_cpu()) {
    const void* at = lr.const_data_ptr();
    g.lr = g.lr_is_double ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
  } else {
    check_same_device(op, argument.c_str(), lr, like);
    g.lr_device = lr.const_data_ptr();
  }
  return g;
}

void run(const char* op, const Tensor& table, const Tensor& pointers, const std::vector<AdamWGroup>& groups,
         Dtype dtype, bool amsgrad, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf) {
  check_scalar(op, "grad_scale", grad_scale, table);
  check_scalar(op, "found_inf", found_inf, table);
  const int64_t count = pointers.numel();
  int64_t* words = static_cast<int64_t*>(table.mutable_data_ptr());
  AdamWParams p{};
  p.tensors = reinterpret_cast<AdamWTensor*>(words);
  p.chunks = reinterpret_cast<const ListChunk*>(words + count * kWordsATensor);
  p.grads = static_cast<const void* const*>(pointers.const_data_ptr());
  p.grad_scale = grad_scale ? static_cast<const float*>(grad_scale->const_data_ptr()) : nullptr;
  p.found_inf = found_inf ? static_cast<const float*>(found_inf->const_data_ptr()) : nullptr;
  p.tensor_count = count;
  p.chunk_count = table.numel() - count * kWordsATensor;
  p.dtype = dtype;
  p.amsgrad = amsgrad;
  for (size_t first = 0; first < groups.size(); first += kAdamWMaxGroups) {
    p.first_group = static_cast<int32_t>(first);
    p.group_count = static_cast<int32_t>(std::min<size_t>(kAdamWMaxGroups, groups.size() - first));
    std::copy_n(groups.begin() + static_cast<int64_t>(first), p.group_count, p.groups);
    run_on(
        op, table, [&](void* stream) { return adamw_cuda(p, stream); },
        [&](const Parallel& threads) { return adamw_cpu(p, threads); });
  }
}

Tensor adamw_table(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs, Tensors steps,
                   std::vector<int64_t> groups) {
  return build_table(kTable, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, groups);
}

void check_words(const char* op, const char* argument, const Tensor& t) {
  if (t.scalar_type() != ScalarType::Long) refuse(op, argument, "int64", dtype_text(t.scalar_type()));
  if (t.dim() != 1 || (t.numel() > 1 && t.stride(0) != 1))
    refuse(op, argument, "one dimension of adjacent elements", shape_text(t));
}

void adamw_pointers(Tensor pointers, Tensor values) {
  check_words(kPointers, "pointers", pointers);
  check_words(kPointers, "values", values);
  check_same_shape(kPointers, "values", values, pointers);
  if (!values.is_cpu()) refuse(kPointers, "values", "a CPU tensor", device_text(values));
  write_words(kPointers, static_cast<const int64_t*>(values.const_data_ptr()), pointers);
}

// constants: float64 [groups, 6] on the CPU: beta1, beta2, eps, weight_decay, maximize, amsgrad.
void adamw_step(Tensor table, Tensor pointers, Tensors lr, Tensor constants, bool wide,
                std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  check_words(kStep, "table", table);
  check_words(kStep, "pointers", pointers);
  check_same_device(kStep, "pointers", pointers, table);
  if (table.numel() < pointers.numel() * kWordsATensor)
    refuse(kStep, "table", "a table of " + std::to_string(pointers.numel()) + " tensors",
           std::to_string(table.numel()) + " words");
  if (wide && table.is_cuda()) refuse(kStep, "wide", "False on CUDA", "True");
  constexpr int64_t kColumns = 6;
  check_dtype(kStep, "constants", constants, Dtype::float64);
  check_shape(kStep, "constants", constants, {static_cast<int64_t>(lr.size()), kColumns});
  if (!constants.is_cpu()) refuse(kStep, "constants", "a CPU tensor", device_text(constants));
  const Tensor rows = as_contiguous(constants);
  const double* row = static_cast<const double*>(rows.const_data_ptr());
  std::vector<AdamWGroup> groups;
  bool amsgrad = false;
  for (size_t i = 0; i < lr.size(); ++i, row += kColumns) {
    AdamWGroup g = group_of(kStep, item("lr", i), lr[i], table);
    g.beta1 = row[0];
    g.beta2 = row[1];
    g.eps = row[2];
    g.weight_decay = row[3];
    g.maximize = row[4] != 0;
    amsgrad = amsgrad || row[5] != 0;
    groups.push_back(g);
  }
  run(kStep, table, pointers, groups, wide ? Dtype::float64 : Dtype::float32, amsgrad, grad_scale, found_inf);
}

void adamw(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors max_exp_avg_sqs, Tensors steps,
           Tensor lr, double beta1, double beta2, double eps, double weight_decay, bool maximize,
           std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  const Dtype dtype = check_params(kOp, params);
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
  AdamWGroup g = group_of(kOp, "lr", lr, params[0]);
  g.beta1 = beta1;
  g.beta2 = beta2;
  g.eps = eps;
  g.weight_decay = weight_decay;
  g.maximize = maximize;
  check_scalar(kOp, "grad_scale", grad_scale, params[0]);
  check_scalar(kOp, "found_inf", found_inf, params[0]);
  const Tensor table =
      build_table(kOp, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, std::vector<int64_t>(count, 0));
  const Tensor pointers = allocate_words(kOp, "gradient addresses", static_cast<int64_t>(count), params[0]);
  write_words(kOp, addresses.data(), pointers);
  run(kOp, table, pointers, {g}, dtype, !max_exp_avg_sqs.empty(), grad_scale, found_inf);
}

WARPSMITH_SCHEMAS(m) {
  m.def(
      "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] "
      "max_exp_avg_sqs, Tensor(e!)[] steps, Tensor lr, float beta1, float beta2, float eps, float weight_decay, bool "
      "maximize, Tensor? grad_scale, Tensor? found_inf) -> ()");
  m.def(
      "adamw_table(Tensor[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, Tensor[] steps, "
      "int[] groups) -> Tensor");
  m.def("adamw_pointers(Tensor(a!) pointers, Tensor values) -> ()");
  // Also writes to what the table points to: no schema can say so, therefore it is only for eager code.
  m.def(
      "adamw_step(Tensor(a!) table, Tensor pointers, Tensor[] lr, Tensor constants, bool wide, Tensor? grad_scale, "
      "Tensor? found_inf) -> ()");
}

WARPSMITH_IMPLEMENTATIONS(m) {
  m.impl("adamw", TORCH_BOX(&adamw));
  m.impl("adamw_table", TORCH_BOX(&adamw_table));
  m.impl("adamw_pointers", TORCH_BOX(&adamw_pointers));
  m.impl("adamw_step", TORCH_BOX(&adamw_step));
}

}  // namespace
}  // namespace warpsmith
