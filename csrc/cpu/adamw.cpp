#include "kernels/optim/adamw.h"

#include <algorithm>

#include "common/vectorize.h"

namespace warpsmith {
namespace {

// Elements of a chunk: long enough to hide the two powers that each chunk computes, short enough to share out evenly.
constexpr int32_t kChunkElems = 16 * 1024;

// Free functions, one a dtype: target_clones reaches neither lambdas nor templates.
#define WARPSMITH_ADAMW(T)                                                                                            \
  WARPSMITH_VECTORIZE void update(const AdamWScalars<T> s, int64_t count, const T* __restrict__ grad,                 \
                                  T* __restrict__ param, T* __restrict__ exp_avg, T* __restrict__ exp_avg_sq,         \
                                  T* __restrict__ max_exp_avg_sq) {                                                   \
    if (max_exp_avg_sq)                                                                                               \
      for (int64_t i = 0; i < count; ++i)                                                                             \
        adamw_element(s, grad[i], param[i], exp_avg[i], exp_avg_sq[i], &max_exp_avg_sq[i]);                           \
    else                                                                                                              \
      for (int64_t i = 0; i < count; ++i) adamw_element<T>(s, grad[i], param[i], exp_avg[i], exp_avg_sq[i], nullptr); \
  }
WARPSMITH_ADAMW(float)
WARPSMITH_ADAMW(double)
#undef WARPSMITH_ADAMW

bool takes_part(const AdamWParams& p, int64_t tensor) {
  const int32_t group = p.tensors[tensor].group - p.first_group;
  return p.grads[tensor] && group >= 0 && group < p.group_count;
}

template <class T> T* at(void* array, int64_t offset) { return array ? static_cast<T*>(array) + offset : nullptr; }

template <class T> void step(const AdamWParams& p, const Parallel& parallel) {
  parallel(p.chunk_count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const ListChunk c = p.chunks[i];
      if (!takes_part(p, c.tensor)) continue;
      const AdamWTensor& t = p.tensors[c.tensor];
      const AdamWGroup& group = p.groups[t.group - p.first_group];
      const auto scalars = adamw_scalars<T>(group, p.grad_scale, adamw_bias_correction(group.beta1, *t.step),
                                            adamw_bias_correction(group.beta2, *t.step));
      const int64_t offset = static_cast<int64_t>(c.chunk) * t.chunk_elems;
      update(scalars, std::min<int64_t>(t.chunk_elems, t.numel - offset),
             static_cast<const T*>(p.grads[c.tensor]) + offset, at<T>(t.param, offset), at<T>(t.exp_avg, offset),
             at<T>(t.exp_avg_sq, offset), at<T>(t.max_exp_avg_sq, offset));
    }
  });
  for (int64_t i = 0; i < p.tensor_count; ++i)
    if (takes_part(p, i)) *p.tensors[i].step += 1;
}

}  // namespace

int32_t adamw_chunk_elems_cpu() { return kChunkElems; }

Status adamw_cpu(const AdamWParams& p, const Parallel& parallel) {
  if (p.found_inf && *p.found_inf != 0) return {};
  switch (p.dtype) {
    case Dtype::float32: step<float>(p, parallel); return {};
    case Dtype::float64: step<double>(p, parallel); return {};
    default: return Status::unsupported(std::string("no CPU kernel for ") + name(p.dtype));
  }
}

}  // namespace warpsmith
