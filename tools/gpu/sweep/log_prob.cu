// Times what linear_log_prob runs over a chunk of logits, beside copies of the same bytes: the log-probability with and
// without the entropy, and the gradient from each row's maximum and sum, over threads of a row; that gradient must have
// the bits of the one that the forward of cross_entropy writes. Build (25 s) and run (3 s) on a GPU machine:
//   nvcc -std=c++20 -O3 --expt-relaxed-constexpr -I csrc -gencode=arch=compute_90a,code=sm_90a
//     tools/gpu/sweep/log_prob.cu csrc/kernels/cross_entropy/cross_entropy.cu -o sweep && ./sweep
#include "common/launch.h"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/cross_entropy_kernel.cuh"
#include "sweep.h"

using namespace warpsmith;
using sweep::allocate, sweep::check, sweep::Row;

namespace {

void report(Status status) {
  if (!status.ok()) std::printf("failed: %s\n", status.what().c_str());
}

void run(int64_t rows, int64_t classes) {
  const int64_t count = rows * classes;
  const auto bytes = [](int64_t n) { return static_cast<size_t>(n); };
  void *logits = sweep::random_bfloat16(count, 1), *dlogits = allocate(bytes(count * 2));
  void* want = allocate(bytes(count * 2));
  std::vector<int64_t> labels(bytes(rows));
  for (int64_t r = 0; r < rows; ++r) labels[bytes(r)] = r * 7919 % classes;
  int64_t* target = allocate<int64_t>(bytes(rows * 8));
  check(cudaMemcpy(target, labels.data(), bytes(rows * 8), cudaMemcpyHostToDevice));
  std::vector<float> ones(bytes(rows), 1.f);
  float* grad = allocate<float>(bytes(rows * 4));
  check(cudaMemcpy(grad, ones.data(), bytes(rows * 4), cudaMemcpyHostToDevice));

  CrossEntropyParams p{};
  p.logits = logits, p.target = target, p.rows = rows, p.classes = classes;
  p.logits_stride = p.dlogits_stride = classes, p.ignore_index = -100, p.dtype = Dtype::bfloat16;
  p.log_prob = allocate(bytes(rows * 4)), p.lse = allocate(bytes(rows * 4));
  p.row_max = allocate(bytes(rows * 4)), p.row_sum = allocate(bytes(rows * 4));
  void* const entropy = allocate(bytes(rows * 4));
  const std::string shape = std::to_string(rows) + "x" + std::to_string(classes);

  std::vector<Row> forward;
  forward.push_back({sweep::time_of([&] { report(cross_entropy_forward_cuda(p, nullptr)); }), "without entropy"});
  CrossEntropyParams with = p;
  with.entropy = entropy;
  forward.push_back({sweep::time_of([&] { report(cross_entropy_forward_cuda(with, nullptr)); }), "chosen: entropy"});
  const CrossEntropyProblem problem{.rows = rows, .classes = classes, .gradient = false};
  for (const int cluster : {1, 2, 4, 8})
    for (const int threads : {128, 192, 256, 384})
      for (const int rows_of_block : {1, 8}) {
        CrossEntropyConfig c = choose_cross_entropy_forward(problem);
        c.cluster = cluster, c.lanes = c.threads = threads;
        cross_entropy_detail::divide(c, cross_entropy_detail::vectors_of(problem));
        c.shared_bytes = int64_t{c.slots} * threads * 16;
        if (c.shared_bytes > 110 * 1024 || c.slots > 32 || cluster * threads > 1024) continue;
        c.blocks = (rows + rows_of_block - 1) / rows_of_block * cluster;
        char text[120];
        std::snprintf(text, sizeof text, "entropy, cluster %d, threads %d, rows of a block %d", cluster, threads,
                      rows_of_block);
        forward.push_back(
            {sweep::time_of([&] { report(cross_entropy_forward_cuda_with(c, with, nullptr)); }, 5, 3), text});
      }
  sweep::print("log-probability " + shape, static_cast<double>(count) * 2, forward, 5);

  CrossEntropyParams q = p;
  q.dlogits = want, q.grad_loss = grad, q.grad_loss_stride = 1;
  report(cross_entropy_forward_cuda(q, nullptr));
  q.dlogits = dlogits;
  std::vector<Row> backward;
  const auto add = [&](std::string text, const std::function<void()>& call) {
    check(cudaMemset(dlogits, 0xff, bytes(count * 2)));
    call();
    if (const unsigned n = sweep::differences(dlogits, want, count).other_bits)
      text += ", OTHER BITS " + std::to_string(n) + " <- chosen or not";
    backward.push_back({sweep::time_of(call), text});
  };
  add("chosen", [&] { report(cross_entropy_backward_cuda(q, nullptr)); });
  for (const int lanes : {64, 128, 256, 512})
    for (const int threads : {128, 256, 512}) {
      if (lanes > threads) continue;
      LaunchConfig config;
      config.grid.x = static_cast<unsigned>((rows * lanes + threads - 1) / threads);
      config.block.x = static_cast<unsigned>(threads);
      add(std::to_string(lanes) + " threads a row, blocks of " + std::to_string(threads), [&] {
        report(launch(cross_entropy::backward_streaming<bfloat16, false>, config, nullptr, q, cross_entropy::Options(q),
                      lanes));
      });
    }
  CrossEntropyParams in_place = q;
  in_place.dlogits = logits;  // last: the logits are gradients then, of the same bytes
  backward.push_back(
      {sweep::time_of([&] { report(cross_entropy_backward_cuda(in_place, nullptr)); }), "chosen, in place"});
  sweep::print("gradient from sums " + shape, static_cast<double>(count) * 4, backward, 8);
  for (void* m : {logits, dlogits, want, static_cast<void*>(target), static_cast<void*>(grad), p.log_prob, p.lse,
                  p.row_max, p.row_sum, entropy})
    check(cudaFree(m));
}

}  // namespace

int main() {
  run(8192, 50304);
  run(4096, 128256);
}
