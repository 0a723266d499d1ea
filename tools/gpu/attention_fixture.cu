// The attention fixture (tests/sim/attention_sm90_fixture.cuh) as a library for attention_fixture.py, which builds it.
#include "../../tests/sim/attention_sm90_fixture.cuh"

#include <cstdio>

#include "device/code_probe.cu"  // which launches ask

// Returns 0, or 1 after it has printed why. `cycles`: one int, raised to the longest life of a consumer warpgroup.
extern "C" int attention_fixture(const void* q, const void* k, const void* v, void* o, float* lse, int* workspace,
                                 int* cycles, int batch, int queries, int keys, int heads, int key_heads, float scale,
                                 int causal, void* stream) {
  using namespace warpsmith;
  const attention_sm90::Problem problem{static_cast<const bfloat16*>(q),
                                        static_cast<const bfloat16*>(k),
                                        static_cast<const bfloat16*>(v),
                                        static_cast<bfloat16*>(o),
                                        lse,
                                        workspace,
                                        cycles,
                                        batch,
                                        queries,
                                        keys,
                                        heads,
                                        key_heads,
                                        scale};
  const Status status =
      causal ? attention_sm90::run<true>(problem, stream) : attention_sm90::run<false>(problem, stream);
  if (!status.ok()) std::printf("%s\n", status.what().c_str());
  return !status.ok();
}
