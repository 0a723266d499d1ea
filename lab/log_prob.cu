// Question: where does linear_log_prob's time over a chunk of logits go, and which threads, clusters and rows are best?
// The log-probability with and without the entropy, and the gradient from each row's maximum and sum: that of the
// log-probability must have the bits that the forward of cross_entropy writes, that of the entropy is compared with the
// kernel of all options. 25 s to build, 5 s to run.
// links: csrc/kernels/cross_entropy/cross_entropy.cu
#include "device/launch.h"
#include "kernels/cross_entropy/backward.cuh"
#include "kernels/cross_entropy/cross_entropy_config.h"
#include "kernels/cross_entropy/forward.cuh"
#include "sweep.h"

using namespace warpsmith;
using cross_entropy::Terms;
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
  std::vector<float> factors(bytes(rows), 256.f);
  float* grad = allocate<float>(bytes(rows * 4));
  check(cudaMemcpy(grad, factors.data(), bytes(rows * 4), cudaMemcpyHostToDevice));

  CrossEntropyParams p{};
  p.logits = logits, p.target = target, p.rows = rows, p.classes = classes;
  p.logits_stride = p.dlogits_stride = classes, p.ignore_index = -100, p.dtype = Dtype::bfloat16;
  p.log_prob = allocate(bytes(rows * 4)), p.lse = allocate(bytes(rows * 4));
  p.row_max = allocate(bytes(rows * 4)), p.row_sum = allocate(bytes(rows * 4));
  const std::string shape = std::to_string(rows) + "x" + std::to_string(classes);

  CrossEntropyParams with = p;
  with.entropy = allocate(bytes(rows * 4));
  const auto entropies = [&] {
    std::vector<float> found(bytes(rows));
    check(cudaMemcpy(found.data(), with.entropy, bytes(rows * 4), cudaMemcpyDeviceToHost));
    return found;
  };
  report(cross_entropy_forward_cuda(with, nullptr));
  const std::vector<float> entropy = entropies();
  for (const bool wanted : {false, true}) {
    const CrossEntropyParams& f = wanted ? with : p;
    const std::string what = wanted ? "entropy" : "without entropy";
    std::vector<Row> forward;
    forward.push_back({sweep::time_of([&] { report(cross_entropy_forward_cuda(f, nullptr)); }), "chosen: " + what});
    const CrossEntropyProblem problem{.rows = rows, .classes = classes, .gradient = false, .loss = false};
    for (const int cluster : {1, 2, 4, 8})
      for (const int threads : {64, 96, 128, 192, 256, 384})
        for (const int rows_of_block : {1, 2, 3, 4, 8}) {
          CrossEntropyConfig c = choose_cross_entropy_forward(problem);
          c.cluster = cluster, c.lanes = c.threads = threads;
          cross_entropy_detail::divide(c, cross_entropy_detail::vectors_of(problem));
          c.shared_bytes = int64_t{c.slots} * threads * 16;
          c.blocks = (rows + rows_of_block - 1) / rows_of_block * cluster;
          if (c.shared_bytes > 110 * 1024 || c.slots > 52 || cluster * threads > 1024 || c.blocks < 132) continue;
          char text[120];
          std::snprintf(text, sizeof text, "cluster %d, threads %d, rows of a block %d", cluster, threads,
                        rows_of_block);
          forward.push_back(
              {sweep::time_of([&] { report(cross_entropy_forward_cuda_with(c, f, nullptr)); }, 5, 3), text});
          float most = 0;
          const std::vector<float> found = entropies();
          for (size_t r = 0; r < found.size(); ++r) most = std::max(most, std::abs(found[r] - entropy[r]));
          if (!(most < 1e-5f)) forward.back().text += ", WRONG by " + std::to_string(most) + ", chosen or not";
        }
    sweep::print("log-probability " + shape + ", " + what, static_cast<double>(count) * 2, forward, 6);
  }

  CrossEntropyParams q = p;
  q.dlogits = want, q.grad_loss = grad, q.grad_loss_stride = 1;
  for (const bool of_entropy : {false, true}) {
    // Beside the gradient that the forward writes, bit for bit; the entropy's beside the kernel of all options.
    q.dlogits = want;
    LaunchConfig config;
    config.grid.x = static_cast<unsigned>(rows), config.block.x = 512;
    const auto all_options = [&] {
      report(launch(cross_entropy::backward_streaming<bfloat16, Terms::general>, config, nullptr, q,
                    cross_entropy::Options(q), 512));
    };
    if (of_entropy) {
      q.entropy = with.entropy, q.grad_log_prob = q.grad_entropy = grad;
      all_options();
    } else {
      report(cross_entropy_forward_cuda(q, nullptr));
    }
    q.dlogits = dlogits;
    std::vector<Row> backward;
    const auto add = [&](std::string text, const std::function<void()>& call) {
      check(cudaMemset(dlogits, 0xff, bytes(count * 2)));
      call();
      const sweep::Differences d = sweep::differences(dlogits, want, count);
      if (of_entropy ? d.wrong : d.other_bits)
        text +=
            ", WRONG " + std::to_string(d.wrong) + ", other bits " + std::to_string(d.other_bits) + ", chosen or not";
      backward.push_back({sweep::time_of(call), text});
    };
    add("chosen", [&] { report(cross_entropy_backward_cuda(q, nullptr)); });
    add("kernel of all options", all_options);
    for (const int lanes : {128, 256, 512})
      for (const int threads : {256, 512}) {
        if (lanes > threads) continue;
        config.grid.x = static_cast<unsigned>((rows * lanes + threads - 1) / threads);
        config.block.x = static_cast<unsigned>(threads);
        add(std::to_string(lanes) + " threads a row, blocks of " + std::to_string(threads), [&] {
          report(launch(of_entropy ? cross_entropy::backward_streaming<bfloat16, Terms::entropy>
                                   : cross_entropy::backward_streaming<bfloat16, Terms::plain>,
                        config, nullptr, q, cross_entropy::Options(q), lanes));
        });
      }
    if (of_entropy) {
      CrossEntropyParams in_place = q;
      in_place.dlogits = logits;  // last: the logits are gradients then, of the same bytes
      backward.push_back(
          {sweep::time_of([&] { report(cross_entropy_backward_cuda(in_place, nullptr)); }), "chosen, in place"});
    }
    sweep::print("gradient from sums " + shape + (of_entropy ? ", and of the entropy" : ""),
                 static_cast<double>(count) * 4, backward, 5);
  }
  for (void* m : {logits, dlogits, want, static_cast<void*>(target), static_cast<void*>(grad), p.log_prob, p.lse,
                  p.row_max, p.row_sum, with.entropy})
    check(cudaFree(m));
}

}  // namespace

int main() {
  for (const int64_t rows : {8192, 4096, 1024}) run(rows, 50304);
  for (const int64_t rows : {4096, 1024}) run(rows, 128256);
  run(8192, 50257);
  run(16384, 32000);
  run(8192, 16384);
  run(16384, 8192);
}
