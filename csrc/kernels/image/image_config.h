#pragma once
#include <cstdint>

#include "common/alignment.h"

// How the kernel shares out images: a pure function of the problem, printable through warpsmith.plan.
namespace warpsmith {

struct ImageProblem {
  int64_t samples = 0, elems = 0;  // elems: of a sample
  int element_bytes = 2;           // of the result
  bool aligned = true;             // x begins on 16 bytes
};

constexpr int kImageThreads = 384;  // a multiple of the channels
constexpr int kImageTogether = 4;   // vectors whose loads a thread has in flight

// A thread makes vectors of 16 bytes of the result, `kImageThreads` apart.
struct ImageConfig {
  int vector_elems = 8;
  bool whole = true;    // no vector crosses the end of a sample, and each is read by one instruction
  int64_t vectors = 0;  // of a sample
  int64_t blocks = 0;
};

constexpr ImageConfig choose_image(const ImageProblem& p) {
  ImageConfig c;
  c.vector_elems = 16 / p.element_bytes;
  c.whole = p.aligned && p.elems % 8 == 0;
  c.vectors = ceil_div(p.elems, c.vector_elems);
  c.blocks = ceil_div(p.samples * c.vectors, int64_t{kImageThreads} * kImageTogether);
  return c;
}

}  // namespace warpsmith
