#pragma once
#include <algorithm>
#include <cstdint>

// How an elementwise op is spread over the card: a pure function of the problem, printable through
// warpsmith.plan("swiglu", ...).
namespace warpsmith {

struct ElementwiseProblem {
  int64_t rows = 0;
  int64_t columns = 0;
  int element_bytes = 2;
  bool contiguous = true;  // every tensor's rows follow each other without gaps
  bool aligned = true;     // every pointer, and where rows have gaps every row, lies on 16 bytes
};

struct ElementwiseConfig {
  bool flat = true;      // the tensors are one row, whatever their shape
  int vector_elems = 1;  // elements of one memory access
  int threads = 128;     // of a block; each takes one vector
  int64_t vectors = 0;   // of a tensor, the last one of a flat tensor not always full
  int64_t blocks = 0;
  const char* why = "";
};

constexpr ElementwiseConfig choose_elementwise(const ElementwiseProblem& p) {
  const int most = 16 / p.element_bytes;
  ElementwiseConfig c;
  c.flat = p.contiguous || p.rows == 1;
  if (p.aligned && (c.flat || p.columns % most == 0)) {
    c.vector_elems = most;
    c.why = c.flat ? "contiguous tensors: one 16-byte vector of each a thread"
                   : "rows of 16-byte vectors: one of each tensor a thread";
  } else {
    c.why = "not made of aligned 16-byte vectors: one element a thread";
  }
  const int64_t elements = p.rows * p.columns;
  c.vectors = (elements + c.vector_elems - 1) / c.vector_elems;
  c.blocks = (c.vectors + c.threads - 1) / c.threads;
  return c;
}

}  // namespace warpsmith
