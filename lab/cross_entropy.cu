// Question: which cluster, threads and rows a block make cross_entropy fastest, beside a copy of the same bytes?
// Loss and gradient, and loss alone. Arguments ROWS CLASSES CLUSTER THREADS: one launch, for a profiler.
// links: csrc/kernels/cross_entropy/cross_entropy.cu
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "sweep.h"

using namespace warpsmith;
using sweep::allocate, sweep::check, sweep::random_bfloat16, sweep::Row;

// With arguments ROWS CLASSES CLUSTER THREADS: one launch of that configuration, for a profiler.
int main(int argc, char** argv) {
  const auto argument = [&](int i) { return argc > i ? std::atoll(argv[i]) : 0; };
  const int64_t shapes[][2] = {{4096, 128256}, {8192, 50304}, {8192, 50257}, {16384, 32000},
                               {32768, 2048},  {65536, 1024}, {131072, 500}, {262144, 128}};
  for (const auto& [rows, classes] : shapes) {
    if (argc > 1 && (argument(1) != rows || argument(2) != classes)) continue;
    const int64_t count = rows * classes;
    void *logits = random_bfloat16(count, 1), *dlogits = allocate(count * 2);
    std::vector<int64_t> labels(rows);
    for (int64_t r = 0; r < rows; ++r) labels[r] = r * 7919 % classes;
    int64_t* target = allocate<int64_t>(rows * 8);
    check(cudaMemcpy(target, labels.data(), rows * 8, cudaMemcpyHostToDevice));
    CrossEntropyParams p{};
    p.logits = logits, p.target = target, p.rows = rows, p.classes = classes;
    p.logits_stride = p.dlogits_stride = classes, p.ignore_index = -100, p.dtype = Dtype::bfloat16;
    p.loss = allocate(rows * 4), p.row_max = allocate(rows * 4), p.row_sum = allocate(rows * 4);
    CrossEntropyProblem problem{.rows = rows, .classes = classes, .aligned = classes % 8 == 0};

    for (const bool gradient : {true, false}) {
      p.dlogits = gradient ? dlogits : nullptr;
      problem.gradient = gradient;
      const double bytes = static_cast<double>(count) * (gradient ? 4 : 2);
      std::vector<Row> all;
      const auto measure = [&](const CrossEntropyConfig& c, const char* mark) {
        Status status;
        const double us = sweep::time_of(
            [&] {
              Status done = cross_entropy_forward_cuda_with(c, p, nullptr);
              status = std::move(done);
            },
            5, 2);
        char s[200];
        std::snprintf(s, sizeof s, "%s cluster %d threads %d lanes %d slots %d bulk %d blocks %lld%s", name(c.kernel),
                      c.cluster, c.threads, c.lanes, c.slots, c.bulk, (long long)c.blocks, mark);
        if (status.ok())
          all.push_back({us, s});
        else
          std::printf("  refused: %s: %s\n", s, status.what().c_str());
      };
      if (argc == 1) measure(choose_cross_entropy_forward(problem), "  <- chosen");
      const int64_t vectors = cross_entropy_detail::vectors_of(problem);
      CrossEntropyConfig looped;
      looped.blocks = rows;
      cross_entropy_detail::divide(looped, vectors);
      if (argc == 1) measure(looped, "  <- chosen where no other fits");
      for (int cluster : {1, 2, 4, 8})
        for (int threads : {64, 96, 128, 192, 256, 320, 384, 512})
          for (bool bulk : {true, false})
            for (int rows_of_block : {1, 8}) {
              CrossEntropyConfig c = looped;
              c.kernel = CrossEntropyKernel::resident, c.cluster = cluster, c.lanes = c.threads = threads;
              cross_entropy_detail::divide(c, vectors), c.bulk = bulk;
              c.shared_bytes = int64_t{c.slots} * threads * 16;
              if (c.shared_bytes > 220 * 1024 || c.slots < 2 || c.slots > 32 || cluster * threads > 1024) continue;
              if (rows / rows_of_block < 128) continue;
              c.blocks = (rows + rows_of_block - 1) / rows_of_block * cluster;
              if (argc > 1 && (argument(3) != cluster || argument(4) != threads || rows_of_block != 1 || !bulk))
                continue;
              measure(c, "");
            }
      for (int lanes = 1; lanes <= 32; lanes *= 2)
        for (int rows_in_turn : {1, 2, 4, 8}) {
          CrossEntropyConfig c = looped;
          c.kernel = CrossEntropyKernel::resident, c.lanes = lanes, c.threads = 128;
          cross_entropy_detail::divide(c, vectors);
          c.shared_bytes = int64_t{c.slots} * c.threads * 16;
          if (argc > 1 || c.slots > 16) continue;
          cross_entropy_detail::spread(c, (rows + rows_in_turn - 1) / rows_in_turn);
          measure(c, "");
        }
      sweep::print(
          std::string(gradient ? "loss + gradient " : "loss ") + std::to_string(rows) + "x" + std::to_string(classes),
          bytes, all, 8);
    }
    for (void* q : {logits, dlogits, static_cast<void*>(target), p.loss, p.row_max, p.row_sum}) check(cudaFree(q));
  }
}
