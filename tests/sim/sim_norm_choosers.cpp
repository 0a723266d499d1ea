// Choosers of the norm family: every choice on an H200, and that every compiled kernel is one.
#include <set>
#include <string>

#include "harness.h"
#include "kernels/norm/backward_config.h"
#include "kernels/norm/forward_config.h"
#include "kernels/norm/norm.h"

namespace warpsmith::test {
namespace {

NormProblem planned(int64_t rows, int64_t columns, bool layer = false, int residual_bytes = 0) {
  NormProblem p;
  p.rows = rows, p.columns = columns, p.layer = layer, p.residual_bytes = residual_bytes;
  return p;
}

std::string choice(const NormConfig& c) {
  std::string text = std::string(name(c.kernel)) + " " + name(c.scope);
  for (const int64_t n : {int64_t{c.vector_elems}, int64_t{c.vectors}, int64_t{c.rows}, int64_t{c.lanes},
                          int64_t{c.threads}, int64_t{c.cluster}, c.blocks})
    text += " " + std::to_string(n);
  return c.stages ? text + " " + std::to_string(c.stages) + " " + std::to_string(c.shared_bytes) : text;
}

// What is chosen for 4,096 rows of 16-bit elements on an H200, at both sides of every boundary: kernel, scope, elements
// of an access, vectors, rows together, lanes, threads, cluster, blocks and, of a ring, stages and shared bytes. A
// choice must not change by accident.
TEST(the_chooser) {
  struct Choice {
    int64_t columns;
    const char *forward, *backward;
  };
  const Choice choices[] = {
      {8, "registers group 8 1 4 1 64 1 16", "ring group 8 1 2 1 128 1 16 2 16384"},
      {16, "registers group 8 1 4 2 64 1 32", "ring group 8 1 2 2 128 1 32 2 16384"},
      {32, "registers group 8 1 4 4 64 1 64", "ring group 8 1 2 4 128 1 64 2 16384"},
      {64, "warp group 8 1 4 8 64 1 128", "ring group 8 1 2 8 128 1 128 2 16384"},
      {128, "warp group 8 1 4 16 64 1 256", "ring group 8 1 2 16 128 1 256 2 16384"},
      {136, "registers group 8 1 4 32 64 1 512", "ring group 8 1 2 32 128 1 512 2 16384"},
      {248, "registers group 8 1 4 32 64 1 512", "ring group 8 1 2 32 128 1 512 2 16384"},
      {256, "warp group 8 1 4 32 64 1 512", "ring group 8 1 2 32 128 1 512 2 16384"},
      {264, "registers group 8 2 1 32 64 1 2048", "batches block 8 1 2 64 64 1 660 3 12288"},
      {512, "warp group 8 2 2 32 64 1 1024", "batches block 8 1 2 64 64 1 660 3 12288"},
      {520, "registers group 8 3 1 32 64 1 2048", "batches block 8 1 2 96 96 1 396 3 18432"},
      {768, "warp group 8 3 2 32 64 1 1024", "batches block 8 1 2 96 96 1 396 3 18432"},
      {776, "registers group 8 4 1 32 64 1 2048", "batches block 8 1 2 128 128 1 396 3 24576"},
      {1016, "registers group 8 4 1 32 64 1 2048", "batches block 8 1 2 128 128 1 396 3 24576"},
      {1024, "warp group 8 4 1 32 64 1 2048", "batches block 8 1 2 128 128 1 396 3 24576"},
      {1032, "registers block 8 2 1 96 96 1 4096", "batches block 8 1 2 160 160 1 264 3 30720"},
      {1288, "registers block 8 2 1 96 96 1 4096", "batches block 8 1 2 192 192 1 264 2 24576"},
      {1800, "registers block 8 2 1 128 128 1 4096", "batches block 8 1 1 256 256 1 264 3 24576"},
      {2048, "registers block 8 2 1 128 128 1 4096", "batches block 8 1 1 256 256 1 264 3 24576"},
      {2056, "registers block 8 2 1 160 160 1 4096", "batches block 8 1 2 288 288 1 132 3 55296"},
      {2568, "registers block 8 2 1 192 192 1 4096", "batches block 8 1 2 352 352 1 132 2 45056"},
      {3840, "registers block 8 2 1 256 256 1 4096", "batches block 8 1 2 480 480 1 132 2 61440"},
      {4096, "registers block 8 2 1 256 256 1 4096", "batches block 8 1 1 512 512 1 132 3 49152"},
      {4104, "registers block 8 4 1 160 160 1 4096", "batches cluster 8 1 2 288 288 2 264 1 27648"},
      {6144, "registers block 8 4 1 192 192 1 4096", "batches cluster 8 1 2 384 384 2 264 1 36864"},
      {6152, "registers block 8 4 1 224 224 1 4096", "batches cluster 8 1 2 224 224 4 368 1 21504"},
      {8192, "shared block 8 4 1 256 256 1 4096", "batches cluster 8 1 2 256 256 4 368 1 24576"},
      {8200, "registers block 8 4 1 288 288 1 4096", "batches cluster 8 1 2 288 288 4 244 1 27648"},
      {12288, "shared block 8 6 1 256 256 1 4096", "batches cluster 8 1 2 384 384 4 244 1 36864"},
      {12296, "registers block 8 4 1 416 416 1 4096", "batches cluster 8 1 2 416 416 4 120 2 66560"},
      {16384, "registers block 8 4 1 512 512 1 4096", "batches cluster 8 1 2 512 512 4 120 2 81920"},
      {16392, "registers cluster 8 4 1 288 288 2 8192", "ring cluster 8 2 2 160 160 8 240 3 61440"},
      {32768, "registers cluster 8 4 1 512 512 2 8192", "ring cluster 8 2 2 256 256 8 120 3 98304"},
      {32776, "registers cluster 8 4 1 288 288 4 16384", "looped block 4 1 1 1024 1024 1 528"},
      {4097, "looped block 1 1 1 1024 1024 1 4096", "looped block 1 1 1 1024 1024 1 528"},
  };
  for (const Choice& expected : choices) {
    const NormProblem p = planned(4096, expected.columns);
    const std::string forward = choice(choose_norm_forward(p)), backward = choice(choose_norm_backward(p));
    expect(forward == expected.forward, "forward of " + std::to_string(expected.columns) + ": " + forward);
    expect(backward == expected.backward, "backward of " + std::to_string(expected.columns) + ": " + backward);
  }
}

// The backward of the other ops where it differs, the residual as wide as the activation or wider.
TEST(the_chooser_of_backwards_with_more_sums_and_tensors) {
  struct Choice {
    int64_t columns;
    bool layer;
    int residual_bytes;
    const char* backward;
  };
  const Choice choices[] = {
      {128, true, 0, "ring group 8 1 2 16 128 1 256 2 16384"},
      {256, true, 0, "ring group 8 1 2 32 128 1 512 2 16384"},
      {264, true, 0, "batches block 8 1 2 64 64 1 792 2 8192"},
      {512, true, 0, "batches block 8 1 2 64 64 1 792 2 8192"},
      {768, true, 0, "batches block 8 1 2 96 96 1 528 2 12288"},
      {1024, true, 0, "batches block 8 1 2 128 128 1 396 2 16384"},
      {1032, true, 0, "batches block 8 1 2 160 160 1 396 2 20480"},
      {2048, true, 0, "batches block 8 1 1 256 256 1 264 3 24576"},
      {4096, true, 0, "batches block 8 1 1 512 512 1 132 3 49152"},
      {1288, true, 0, "batches block 8 1 2 192 192 1 264 2 24576"},
      {2056, true, 0, "batches block 8 1 1 288 288 1 264 3 27648"},
      {2568, true, 0, "batches block 8 1 2 352 352 1 132 2 45056"},
      {4104, true, 0, "batches cluster 8 2 1 160 160 2 396 2 20480"},
      {6144, true, 0, "batches cluster 8 2 1 192 192 2 264 2 24576"},
      {8192, true, 0, "batches cluster 8 1 2 512 512 2 132 2 65536"},
      {8200, true, 0, "batches cluster 8 2 1 160 160 4 368 2 20480"},
      {12288, true, 0, "batches cluster 8 2 1 192 192 4 244 2 24576"},
      {12296, true, 0, "batches cluster 8 2 1 224 224 4 244 2 28672"},
      {16384, true, 0, "batches cluster 8 2 1 256 256 4 244 2 32768"},
      {32768, true, 0, "ring cluster 8 2 2 256 256 8 120 3 98304"},
      {32776, true, 0, "looped block 4 1 1 1024 1024 1 528"},
      {128, false, 2, "ring group 8 1 2 16 128 1 256 2 24576"},
      {256, false, 2, "ring group 8 1 2 32 128 1 396 2 24576"},
      {264, false, 2, "batches block 8 1 2 64 64 1 924 1 6144"},
      {512, false, 2, "batches block 8 1 2 64 64 1 924 1 6144"},
      {768, false, 2, "batches block 8 1 2 96 96 1 660 1 9216"},
      {1024, false, 2, "batches block 8 1 2 128 128 1 396 1 12288"},
      {1032, false, 2, "batches block 8 1 2 160 160 1 264 2 30720"},
      {2056, false, 2, "batches block 8 1 2 288 288 1 132 2 55296"},
      {2048, false, 2, "batches block 8 1 2 256 256 1 264 1 24576"},
      {4096, false, 2, "batches block 8 1 2 512 512 1 132 1 49152"},
      {4104, false, 2, "batches cluster 8 1 2 160 160 4 368 2 30720"},
      {5128, false, 2, "batches cluster 8 1 2 352 352 2 132 2 67584"},
      {8192, false, 2, "batches cluster 8 1 2 512 512 2 132 1 49152"},
      {8200, false, 2, "batches cluster 8 1 2 288 288 4 120 2 55296"},
      {12288, false, 2, "batches cluster 8 1 2 384 384 4 120 2 73728"},
      {12296, false, 2, "batches cluster 8 1 2 416 416 4 120 2 79872"},
      {16384, false, 2, "batches cluster 8 1 2 512 512 4 120 2 98304"},
      {32768, false, 2, "ring cluster 8 2 2 256 256 8 120 3 147456"},
      {32776, false, 2, "looped block 4 1 1 1024 1024 1 528"},
      {128, true, 2, "ring group 8 1 2 16 256 1 128 2 49152"},
      {256, true, 2, "ring group 8 1 2 32 256 1 256 2 49152"},
      {264, true, 2, "batches block 8 1 1 64 64 1 792 3 9216"},
      {512, true, 2, "batches block 8 1 1 64 64 1 792 3 9216"},
      {768, true, 2, "batches block 8 1 1 96 96 1 528 3 13824"},
      {1024, true, 2, "batches block 8 1 1 128 128 1 396 3 18432"},
      {1032, true, 2, "batches block 8 1 1 160 160 1 396 2 15360"},
      {2048, true, 2, "batches block 8 1 1 256 256 1 264 2 24576"},
      {4096, true, 2, "batches block 8 1 1 512 512 1 132 2 49152"},
      {1288, true, 2, "batches block 8 1 1 192 192 1 264 3 27648"},
      {2056, true, 2, "batches block 8 2 1 160 160 1 396 1 25600"},
      {2568, true, 2, "batches block 8 2 1 192 192 1 264 2 49152"},
      {3072, true, 2, "batches block 8 1 1 384 384 1 132 3 55296"},
      {4104, true, 2, "batches block 8 2 1 288 288 1 132 2 73728"},
      {7168, true, 2, "batches cluster 8 1 2 448 448 2 132 2 86016"},
      {8192, true, 2, "batches cluster 8 1 2 512 512 2 132 1 49152"},
      {8200, true, 2, "batches cluster 8 1 2 288 288 4 120 2 55296"},
      {12288, true, 2, "batches cluster 8 1 2 384 384 4 120 2 73728"},
      {12296, true, 2, "batches cluster 8 1 2 416 416 4 120 2 79872"},
      {16384, true, 2, "batches cluster 8 1 2 512 512 4 120 2 98304"},
      {32768, true, 2, "ring cluster 8 2 2 256 256 8 120 3 147456"},
      {32776, true, 2, "looped block 4 1 1 1024 1024 1 528"},
      {128, true, 4, "ring group 4 1 1 32 128 1 792 2 12288"},
      {256, true, 4, "ring group 4 2 1 32 256 1 132 2 49152"},
      {264, true, 4, "ring group 4 3 1 32 256 1 132 2 73728"},
      {512, true, 4, "ring group 4 4 1 32 256 1 132 2 98304"},
      {768, true, 4, "ring block 4 2 1 96 96 1 528 4 36864"},
      {1024, true, 4, "ring block 4 2 1 128 128 1 528 4 49152"},
      {1032, true, 4, "ring block 4 2 1 160 160 1 396 4 61440"},
      {4096, true, 4, "ring block 4 2 1 512 512 1 132 4 196608"},
      {4104, true, 4, "ring cluster 4 2 2 96 96 8 488 2 36864"},
      {6144, true, 4, "ring cluster 4 2 2 96 96 8 488 2 36864"},
      {6152, true, 4, "ring cluster 4 2 2 128 128 8 368 2 49152"},
      {16384, true, 4, "ring cluster 4 2 2 256 256 8 120 3 147456"},
      {128, false, 4, "ring group 4 1 1 32 128 1 792 2 12288"},
      {256, false, 4, "ring group 4 2 1 32 256 1 132 2 49152"},
      {264, false, 4, "ring group 4 3 1 32 256 1 132 2 73728"},
      {512, false, 4, "ring group 4 4 1 32 256 1 132 2 98304"},
      {768, false, 4, "ring block 4 2 1 96 96 1 528 4 36864"},
      {1024, false, 4, "ring block 4 2 1 128 128 1 528 4 49152"},
      {1032, false, 4, "ring block 4 2 1 160 160 1 396 4 61440"},
      {4096, false, 4, "ring block 4 2 1 512 512 1 132 4 196608"},
      {4104, false, 4, "ring block 4 2 1 544 544 1 132 4 208896"},
      {6144, false, 4, "ring block 4 2 1 768 768 1 132 3 221184"},
      {6152, false, 4, "ring cluster 4 2 2 128 128 8 368 3 73728"},
      {16384, false, 4, "ring cluster 4 2 2 256 256 8 120 3 147456"},
  };
  for (const Choice& expected : choices) {
    const std::string c =
        choice(choose_norm_backward(planned(4096, expected.columns, expected.layer, expected.residual_bytes)));
    expect(c == expected.backward, std::to_string(expected.columns) + (expected.layer ? " layer " : " rms ") +
                                       std::to_string(expected.residual_bytes) + ": " + c);
  }
}

// The blocks that a backward's launch counts on have room in a multiprocessor, also of smaller ones.
TEST(the_blocks_of_a_backward_have_room_in_the_multiprocessor) {
  for (const int kilobytes : {99, 163, 227})
    for (const bool layer : {false, true})
      for (const int residual_bytes : {0, 2, 4})
        for (int64_t columns = 8; columns <= 16384; columns += 8) {
          NormProblem p = planned(1 << 20, columns, layer, residual_bytes);
          p.max_shared_bytes = kilobytes * 1024;
          const NormConfig c = choose_norm_backward(p);
          if (c.kernel == NormKernel::looped) continue;
          const int64_t together = (c.blocks + p.multiprocessors - 1) / p.multiprocessors;
          const int64_t block =
              c.shared_bytes + 1024 + (c.kernel == NormKernel::batches ? (c.cluster > 1 ? 4096 : 1024) : 384);
          expect(together * block <= p.max_shared_bytes + 1024,
                 std::to_string(columns) + " columns, " + std::to_string(kilobytes) + " KiB: " + choice(c));
        }
}

TEST(the_chooser_on_other_machines) {
  expect_equal("one row, one cluster", choose_norm_backward(planned(1, 16384)).blocks, int64_t{4});
  expect_equal("short rows, five blocks a multiprocessor", choose_norm_backward(planned(131072, 128)).blocks,
               int64_t{660});
  expect_equal("of layer_norm with a residual, two", choose_norm_backward(planned(131072, 128, true, 2)).blocks,
               int64_t{264});
  NormProblem p = planned(3, 12288);
  p.code_capability = 80;
  p.max_shared_bytes = 99 * 1024;  // compute capability 8.6
  expect(choice(choose_norm_backward(p)) == "batches block 8 2 1 768 768 1 3 1 98304", choice(choose_norm_backward(p)));
  p.columns = 16384;
  expect(choice(choose_norm_backward(p)) == "batches block 8 4 1 512 512 1 3 1 65536", choice(choose_norm_backward(p)));
  p.columns = 16392;
  expect(choice(choose_norm_backward(p)) == "looped block 4 1 1 1024 1024 1 3", choice(choose_norm_backward(p)));
  p.aligned = false;
  expect(choice(choose_norm_backward(p)) == "looped block 1 1 1 1024 1024 1 3", choice(choose_norm_backward(p)));
  expect_equal("rows of partial sums, one a group", norm_partial_rows(choose_norm_backward(planned(20, 5))),
               int64_t{24});
}

TEST(the_chooser_of_rows_of_a_block) {
  const auto plan = [](int64_t columns) {
    NormProblem p;
    p.rows = 4096, p.columns = columns, p.layer = true;
    return p;
  };
  struct Choice {
    int64_t columns;
    int vectors, threads;
  };
  for (const Choice& expected :
       {Choice{1032, 2, 96}, {1536, 2, 96},   {1544, 2, 128},  {2304, 3, 96},   {2560, 2, 160},  {3840, 3, 160},
        {4088, 2, 256},      {4096, 2, 256},  {4104, 4, 192},  {5120, 4, 160},  {5376, 4, 192},  {6144, 4, 192},
        {6152, 4, 256},      {7168, 4, 224},  {8184, 4, 256},  {8200, 4, 320},  {9216, 4, 288},  {10240, 4, 320},
        {10248, 4, 384},     {11264, 4, 352}, {13312, 4, 416}, {12280, 4, 384}, {12296, 4, 512}, {14336, 4, 448},
        {14344, 4, 512},     {16384, 4, 512}}) {
    const NormConfig c = choose_norm_forward(plan(expected.columns));
    const std::string text = std::to_string(expected.columns) + ": " + name(c.kernel) + " " +
                             std::to_string(c.vectors) + " " + std::to_string(c.threads);
    expect(c.kernel == NormKernel::block && c.vectors == expected.vectors && c.threads == expected.threads, text);
    const auto is = [&](NormKernel kernel, const auto& change) {
      NormProblem p = plan(expected.columns);
      change(p);
      expect(choose_norm_forward(p).kernel == kernel, text + " and a change: " + name(choose_norm_forward(p).kernel));
    };
    is(NormKernel::registers, [](NormProblem& p) { p.layer = false; });
    is(NormKernel::registers, [](NormProblem& p) { p.residual_bytes = 2; });
    is(NormKernel::registers, [](NormProblem& p) { p.affine_as_x = false; });
    is(NormKernel::looped, [](NormProblem& p) { p.aligned = false; });
  }
  for (const int64_t columns : {1024, 8192, 12288, 16392})
    expect(choose_norm_forward(plan(columns)).kernel != NormKernel::block, std::to_string(columns));
}

// Every compiled kernel is chosen for some problem, and every choice is a compiled kernel.
TEST(the_choosers_use_every_compiled_kernel) {
  const auto check = [](const NormProblem& types, const auto& each, const auto& choose) {
    std::set<int> chosen;
    NormProblem p = types;
    for (const int code : {80, 90})
      for (const bool affine_as_x : {true, false})
        for (const int64_t rows : {1, 1000, 100000})
          for (int64_t columns = 8; columns <= 40000; columns += columns < 8 * 1024 ? 8 : 256) {
            p.rows = rows, p.columns = columns, p.code_capability = code, p.affine_as_x = affine_as_x;
            const NormConfig c = choose(p);
            expect((c.instance < 0) == (c.kernel == NormKernel::looped), choice(c));
            if (c.instance >= 0) chosen.insert(c.instance);
          }
    int place = 0;
    each(types, [&](const NormInstance& i) {
      const std::string text = std::string(name(i.kernel)) + " " + name(i.scope) + ", " + std::to_string(i.vectors) +
                               " vectors, " + std::to_string(i.max_threads) + " threads";
      expect(chosen.count(place++) == 1, (types.layer ? "layer: " : "rms: ") + text + " is never chosen");
    });
  };
  for (const int element_bytes : {2, 4})
    for (const bool layer : {false, true})
      for (const int residual_bytes : {0, 2, 4}) {
        if (residual_bytes && residual_bytes < element_bytes) continue;
        NormProblem p;
        p.element_bytes = element_bytes, p.residual_bytes = residual_bytes, p.layer = layer;
        check(p, NormForwardInstances(), [](const NormProblem& q) { return choose_norm_forward(q); });
        check(p, NormBackwardInstances(), [](const NormProblem& q) { return choose_norm_backward(q); });
      }
}

}  // namespace
}  // namespace warpsmith::test
