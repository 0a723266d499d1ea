#include "kernels/attention/portable/attention_portable.h"

#include <algorithm>
#include <string>

#include "common/half.h"
#include "kernels/attention/attention_config.h"
#include "kernels/attention/head_tensor.h"
#include "kernels/attention/portable/portable_config.h"
#include "kernels/attention/portable/portable_grid.h"

namespace warpsmith {
namespace attention {
namespace {

template <class P> bool fits_vectors(const P& p) {
  return all_fit(p, [&](const HeadTensor& t) {
    const int64_t bytes = size_bytes(p.problem.dtype);
    const auto fits = [&](int64_t stride, int64_t size) { return size <= 1 || stride * bytes % 16 == 0; };
    return reinterpret_cast<uintptr_t>(t.base) % 16 == 0 && fits(t.strides.seq, t.length) &&
           fits(t.strides.head, t.heads) && fits(t.strides.batch, t.batch);
  });
}

constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;

Status supported(const AttentionProblem& p, bool vectors, int64_t blocks) {
  AttentionKernelProblem k;
  k.element_bytes = size_bytes(p.dtype);
  k.seqlen_q = p.seqlen_q;
  k.seqlen_k = p.seqlen_k;
  k.vectors = vectors;
  k.fits_grid = blocks <= kMostBlocks;
  const char* why = reason_against_portable(k);
  return why == nullptr ? Status() : Status::unsupported(std::string("no portable kernel for ") + why);
}

}  // namespace
}  // namespace attention

Status attention_forward_supported_portable(const AttentionFwdParams& x) {
  using namespace attention;
  const AttentionProblem& p = x.problem;
  return supported(p, fits_vectors(x), row_tiles(p, false, kPortableForward[tile_of(p)].rows) * p.heads_q);
}

Status attention_backward_supported_portable(const AttentionBwdParams& x) {
  using namespace attention;
  const AttentionProblem& p = x.problem;
  const PortableTile& tile = kPortableQueries[tile_of(p)];
  int64_t blocks = std::max(row_tiles(p, false, std::min(tile.rows, kStatisticsQueries)) * p.heads_q,
                            row_tiles(p, true, portable_key_rows(tile_of(p))) * p.heads_k);
  if (x.dbias != nullptr) {
    const PortableTile& bias = kPortableBias[tile_of(p) - kPortablePlain];
    blocks = std::max(blocks, BiasTiles(p, x.dbias_strides, bias.rows, bias.columns).count);
  }
  return supported(p, fits_vectors(x), blocks);
}

int64_t attention_backward_workspace_portable(const AttentionBwdParams& x) {
  using namespace attention;
  const bool ordered_dq = size_bytes(x.problem.dtype) == 2 && !is_extended(x.problem);
  const int64_t of_ordered_dq = ordered_dq ? PortableOrderedDqWorkspace(x.problem).bytes : 0;
  const int64_t statistics = row_tiles(x.problem, false, kStatisticsQueries) * kStatistics;
  const int64_t blocks = row_tiles(x.problem, false, kPortableQueries[tile_of(x.problem)].rows);
  return std::max(of_ordered_dq, (statistics + blocks) * x.problem.heads_q * 4);
}

int64_t attention_dbias_workspace_portable(const AttentionBwdParams& x) {
  using namespace attention;
  return row_tiles(x.problem, false, kStatisticsQueries) * kStatistics * x.problem.heads_q * 4;
}

Status attention_forward_portable(const AttentionFwdParams& p, void* stream) {
  switch (p.problem.dtype) {
    case Dtype::bfloat16: return attention::run_forward_portable<bfloat16>(p, stream);
    case Dtype::float16: return attention::run_forward_portable<float16>(p, stream);
    default: return attention::run_forward_portable<float>(p, stream);
  }
}

Status attention_backward_portable(const AttentionBwdParams& p, void* stream) {
  switch (p.problem.dtype) {
    case Dtype::bfloat16: return attention::run_backward_portable<bfloat16>(p, stream);
    case Dtype::float16: return attention::run_backward_portable<float16>(p, stream);
    default: return attention::run_backward_portable<float>(p, stream);
  }
}

Status attention_dbias_portable(const AttentionBwdParams& p, void* stream) {
  return p.problem.dtype == Dtype::bfloat16 ? attention::run_dbias_portable<bfloat16>(p, stream)
                                            : attention::run_dbias_portable<float16>(p, stream);
}

}  // namespace warpsmith
