#include "kernels/attention/attention.h"

#include <atomic>

#include "kernels/attention/hopper/attention_sm90.h"
#include "kernels/attention/portable/attention_portable.h"

// Chooses the kernels of a problem: the Hopper kernels (sm_90a) where the library contains them and they support the
// problem, otherwise the portable kernels, which support every option.
namespace {
std::atomic<bool> portable_alone{false};
}

namespace warpsmith {

void attention_portable_alone(bool on) { portable_alone = on; }

namespace {
#if defined(WARPSMITH_SM90A) || defined(WARPSMITH_SIM)
constexpr bool kHopperKernels = true;

// Whether the Hopper kernels take the problem.
bool on_hopper(const AttentionFwdParams& p) { return !portable_alone && attention_forward_supported_sm90(p).ok(); }
bool on_hopper(const AttentionBwdParams& p) {
  return !portable_alone && attention_backward_supported_sm90(p).ok() &&
         (p.dbias == nullptr || attention_backward_supported_portable(p).ok());
}
#else
constexpr bool kHopperKernels = false;

template <class P> constexpr bool on_hopper(const P&) { return false; }
#endif

// Where the Hopper backward has no kernel for dbias, the portable kernel makes it, with a workspace after the Hopper
// kernels' own. Templates, because the Hopper functions exist only where the code above says so.
constexpr int64_t aligned_bytes(int64_t bytes) { return (bytes + 255) / 256 * 256; }

template <class P> bool portable_dbias(const P& p) { return p.dbias != nullptr && !attention_dbias_on_sm90(p); }
template <class P> Status hopper_workspace(const P& p, int64_t* bytes) {
  WARPSMITH_RETURN_IF_FAILED(attention_backward_workspace_sm90(p, bytes));
  if (portable_dbias(p)) *bytes = aligned_bytes(*bytes) + attention_dbias_workspace_portable(p);
  return {};
}
template <class P> Status run_hopper(const P& p, void* stream) {
  WARPSMITH_RETURN_IF_FAILED(attention_backward_sm90(p, stream));
  if (!portable_dbias(p)) return {};
  int64_t bytes = 0;
  WARPSMITH_RETURN_IF_FAILED(attention_backward_workspace_sm90(p, &bytes));
  P x = p;
  x.workspace = static_cast<unsigned char*>(p.workspace) + aligned_bytes(bytes);
  return attention_dbias_portable(x, stream);
}
}  // namespace

Status attention_forward_supported_cuda(const AttentionFwdParams& p) {
  if constexpr (kHopperKernels)
    if (on_hopper(p)) return {};
  return attention_forward_supported_portable(p);
}
Status attention_backward_supported_cuda(const AttentionBwdParams& p) {
  if constexpr (kHopperKernels)
    if (on_hopper(p)) return {};
  return attention_backward_supported_portable(p);
}

Status attention_forward_workspace_cuda([[maybe_unused]] const AttentionFwdParams& p, int64_t* bytes) {
  if constexpr (kHopperKernels)
    if (on_hopper(p)) return attention_forward_workspace_sm90(p, bytes);
  *bytes = 0;
  return {};
}
Status attention_backward_workspace_cuda(const AttentionBwdParams& p, int64_t* bytes) {
  if constexpr (kHopperKernels)
    if (on_hopper(p)) return hopper_workspace(p, bytes);
  *bytes = attention_backward_workspace_portable(p);
  return {};
}

Status attention_forward_cuda(const AttentionFwdParams& p, void* stream) {
  if constexpr (kHopperKernels)
    if (on_hopper(p)) return attention_forward_sm90(p, stream);
  return attention_forward_portable(p, stream);
}
Status attention_backward_cuda(const AttentionBwdParams& p, void* stream) {
  if constexpr (kHopperKernels)
    if (on_hopper(p)) return run_hopper(p, stream);
  return attention_backward_portable(p, stream);
}

}  // namespace warpsmith
