#include "kernels/max_pool/max_pool.h"

#include "common/visit_dtype.h"
#include "device/launch.h"
#include "kernels/max_pool/backward.cuh"
#include "kernels/max_pool/forward.cuh"

// From params to launches.
namespace warpsmith {

using namespace max_pool;

namespace {

// visit.template operator()<T, N>(): vectors of 16 bytes, or single elements.
template <class Visit> Status visit_vectors(Dtype dtype, int vector_elems, Visit&& visit) {
  return visit_cuda_dtype(dtype, [&]<class T>() {
    constexpr int N = 16 / sizeof(T);
    return vector_elems == N ? visit.template operator()<T, N>() : visit.template operator()<T, 1>();
  });
}

template <class Params>
Status run(void (*kernel)(Params, Places), const Params& p, const MaxPoolConfig& c, bool backward, void* stream) {
  const LaunchConfig config{.grid = static_cast<unsigned>(c.blocks(p.problem(), backward)), .block = kThreads};
  return launch(kernel, config, stream, p, Places(p, c, backward));
}

}  // namespace

Status max_pool2d_forward_cuda(const MaxPoolForwardParams& p, void* stream) {
  const MaxPoolConfig c = choose_max_pool(p.problem());
  return visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() {
    const auto kernel = c.square == 3   ? &forward_square<T, N, 3>
                        : c.square == 2 ? &forward_square<T, N, 2>
                                        : &forward_any<T, N>;
    return run(kernel, p, c, false, stream);
  });
}

Status max_pool2d_backward_cuda(const MaxPoolBackwardParams& p, void* stream) {
  const MaxPoolConfig c = choose_max_pool(p.problem());
  return visit_vectors(p.dtype, c.vector_elems, [&]<class T, int N>() {
    const auto kernel = c.square == 3   ? &backward_square<T, N, 3>
                        : c.square == 2 ? &backward_square<T, N, 2>
                                        : &backward_any<T, N>;
    return run(kernel, p, c, true, stream);
  });
}

}  // namespace warpsmith
