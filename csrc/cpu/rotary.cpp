#include "cpu/rotary.h"

#include <string>

namespace warpsmith {
namespace {

int64_t offset_of(const RotaryPositions& p, int64_t entry) {
  if (!p.offsets) return p.offset;
  const int64_t at = entry * p.offset_stride;
  return p.offset +
         (p.wide_offsets ? static_cast<const int64_t*>(p.offsets)[at] : static_cast<const int32_t*>(p.offsets)[at]);
}

Status refused(const char* argument, const std::string& expected, const std::string& got) {
  return Status::failure(Status::Kind::invalid_argument,
                         std::string(argument) + ": expected " + expected + ", got " + got);
}

}  // namespace

int64_t RotaryRows::operator()(int64_t batch, int64_t index) {
  if (angles_.per_token) return batch * angles_.batch_stride + index * angles_.row_stride;
  int64_t position = index, entry = batch;
  if (positions_.cu_seqlens) {
    while (positions_.cu_seqlens[sequence_ + 1] <= index) ++sequence_;
    entry = sequence_;
    position -= positions_.cu_seqlens[entry];
  }
  return (position + offset_of(positions_, entry)) * angles_.row_stride;
}

Status rotary_check_positions_cpu(const RotaryShape& shape, const RotaryAngles& angles, const RotaryPositions& p) {
  if (angles.per_token) return {};
  const int64_t entries = p.cu_seqlens ? p.sequences : shape.batch;
  if (p.cu_seqlens) {
    if (p.cu_seqlens[0] != 0) return refused("cu_seqlens", "0 first", std::to_string(p.cu_seqlens[0]));
    for (int64_t i = 0; i < entries; ++i)
      if (p.cu_seqlens[i] > p.cu_seqlens[i + 1])
        return refused("cu_seqlens", "ascending values",
                       std::to_string(p.cu_seqlens[i]) + " before " + std::to_string(p.cu_seqlens[i + 1]));
    if (p.cu_seqlens[entries] != shape.tokens)
      return refused("cu_seqlens", "the number of tokens last, " + std::to_string(shape.tokens),
                     std::to_string(p.cu_seqlens[entries]));
  }
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t tokens = p.cu_seqlens ? p.cu_seqlens[i + 1] - p.cu_seqlens[i] : shape.tokens;
    const int64_t first = offset_of(p, i);
    if (tokens > 0 && (first < 0 || first > angles.rows - tokens))
      return refused("position_offset", "positions from 0 to " + std::to_string(angles.rows - 1) + ", the rows of cos",
                     std::to_string(tokens) + " from " + std::to_string(first) +
                         (p.cu_seqlens ? " in sequence " : " in batch entry ") + std::to_string(i));
  }
  return {};
}

}  // namespace warpsmith
