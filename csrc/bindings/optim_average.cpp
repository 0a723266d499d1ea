#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/tensor.h"
#include "bindings/support/tensor_list.h"
#include "kernels/optim/average.h"
#include "kernels/optim/grad_norm.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "average_weights";

bool same_order(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

void average_weights(Tensors averages, Tensors values, double weight, std::optional<Tensor> found_inf) {
  if (averages.empty()) refuse(kOp, "averages", "at least one tensor", "none");
  if (values.size() != averages.size())
    refuse(kOp, "values", std::to_string(averages.size()) + " tensors", std::to_string(values.size()));
  if (!(weight >= 0 && weight <= 1)) refuse(kOp, "weight", "a number from 0 to 1", std::to_string(weight));
  std::vector<AverageTensor> records;
  int64_t total = 0;
  for (size_t i = 0; i < averages.size(); ++i) {
    const Tensor &average = averages[i], &value = values[i];
    const std::string of_average = item("averages", i), of_value = item("values", i);
    const Dtype dtype = float_dtype(kOp, of_value.c_str(), value);
    check_dtype(kOp, of_average.c_str(), average, dtype == Dtype::float64 ? Dtype::float64 : Dtype::float32);
    check_same_device(kOp, of_average.c_str(), average, averages[0]);
    check_same_device(kOp, of_value.c_str(), value, averages[0]);
    check_same_shape(kOp, of_average.c_str(), average, value);
    if (!is_dense(value)) refuse(kOp, of_value.c_str(), "elements without gaps or overlap", "other strides");
    if (!same_order(average, value)) refuse(kOp, of_average.c_str(), "the strides of its value", "others");
    records.push_back({average.mutable_data_ptr(), value.const_data_ptr(), value.numel(), 0, 0, dtype});
    total += value.numel();
  }
  AverageParams params{};
  params.weight = weight;
  if (found_inf) {
    check_dtype(kOp, "found_inf", *found_inf, Dtype::float32);
    check_same_device(kOp, "found_inf", *found_inf, averages[0]);
    if (found_inf->numel() != 1) refuse(kOp, "found_inf", "one element", shape_text(*found_inf));
    params.found_inf = static_cast<const float*>(found_inf->const_data_ptr());
  }
  int32_t chunk_elems = 0;
  run_on(
      kOp, averages[0], [&](void*) { return norm_chunk_elems_cuda(total, &chunk_elems); },
      [&](const Parallel&) {
        chunk_elems = norm_chunk_elems_cpu();
        return Status();
      });
  const std::vector<int64_t> words = tensor_list_words(records, chunk_elems);
  const auto record_words = static_cast<int64_t>(records.size() * sizeof(AverageTensor) / sizeof(int64_t));
  const Tensor table = allocate_words(kOp, "table", static_cast<int64_t>(words.size()), averages[0]);
  write_words(kOp, words.data(), table);
  params.tensors = static_cast<const AverageTensor*>(table.const_data_ptr());
  params.chunks =
      reinterpret_cast<const ListChunk*>(static_cast<const int64_t*>(table.const_data_ptr()) + record_words);
  params.chunk_count = static_cast<int64_t>(words.size()) - record_words;
  run_on<average_cuda, average_cpu>(kOp, averages[0], params);
}

WARPSMITH_OPS(m) {
  m.add("average_weights(Tensor(a!)[] averages, Tensor[] values, float weight, Tensor? found_inf) -> ()",
        TORCH_BOX(&average_weights));
}

}  // namespace
}  // namespace warpsmith
