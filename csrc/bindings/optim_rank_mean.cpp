#include "bindings/support/device.h"
#include "bindings/support/library.h"
#include "bindings/support/tensor.h"
#include "bindings/support/tensor_list.h"
#include "kernels/optim/rank_mean.h"

namespace warpsmith {
namespace {

constexpr const char* kOp = "rank_mean";

// The dtype of a vector of `count` adjacent elements beside the parts: theirs, or float32.
Dtype check_vector(const char* argument, const Tensor& t, const Tensor& parts, Dtype dtype) {
  const Dtype own = float_dtype(kOp, argument, t);
  if (own != dtype && own != Dtype::float32) refuse(kOp, argument, same_or_float32_text(dtype).c_str(), name(own));
  check_shape(kOp, argument, t, {parts.size(1)});
  check_same_device(kOp, argument, t, parts);
  if (t.numel() > 1 && t.stride(0) != 1) refuse(kOp, argument, "adjacent elements", "other strides");
  return own;
}

void rank_mean(Tensor parts, std::optional<Tensor> own, int64_t rank, Tensors outs) {
  RankMeanParams params{};
  params.dtype = float_dtype(kOp, "parts", parts);
  if (parts.dim() != 2 || parts.size(0) < 1)
    refuse(kOp, "parts", "shape (ranks, elements) with at least one rank", shape_text(parts));
  if (parts.size(1) > 1 && parts.stride(1) != 1) refuse(kOp, "parts", "rows of adjacent elements", "other strides");
  if (rank < 0 || rank >= parts.size(0))
    refuse(kOp, "rank", "a row of parts, of " + std::to_string(parts.size(0)), std::to_string(rank));
  if (outs.size() > kMostRankMeanOuts)
    refuse(kOp, "outs", "at most " + std::to_string(kMostRankMeanOuts), std::to_string(outs.size()));
  params.parts = parts.const_data_ptr();
  params.count = parts.size(1);
  params.stride = parts.stride(0);
  params.ranks = static_cast<int32_t>(parts.size(0));
  params.rank = static_cast<int32_t>(rank);
  if (own) {
    params.own_dtype = check_vector("own", *own, parts, params.dtype);
    params.own = own->const_data_ptr();
  }
  for (size_t i = 0; i < outs.size(); ++i) {
    const Dtype dtype = check_vector(item("outs", i).c_str(), outs[i], parts, params.dtype);
    params.outs[i] = {outs[i].mutable_data_ptr(), dtype};
  }
  params.out_count = static_cast<int32_t>(outs.size());
  run_on<rank_mean_cuda, rank_mean_cpu>(kOp, parts, params);
}

// outs: where the mean of the rows of parts goes. own: stands for row `rank`; it may be one of outs.
WARPSMITH_OPS(m) {
  m.add("rank_mean(Tensor parts, Tensor? own, int rank, Tensor(a!)[] outs) -> ()", TORCH_BOX(&rank_mean));
}

}  // namespace
}  // namespace warpsmith
