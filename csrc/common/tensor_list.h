#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

// Many tensors, one launch. A multi-tensor op reads a table in device memory: first one fixed-size record a tensor (the
// op defines it), then one ListChunk a block. The table depends only on addresses and sizes, so it is built once and
// kept; what changes more often (the gradients' addresses) lies in a column of its own.
namespace warpsmith {

// What a column holds in place of an address. torch gives a tensor without elements the address 0; such a tensor still
// takes part in a step, so it has a number of its own. Python reads it from warpsmith._C.NO_ELEMENTS.
constexpr int64_t kNoGradient = 0, kNoElements = 16;

// A piece of one tensor: elements [chunk * chunk_elems, (chunk + 1) * chunk_elems), cut at the tensor's end.
struct ListChunk {
  int32_t tensor;
  int32_t chunk;
};
static_assert(sizeof(ListChunk) == sizeof(int64_t));

// A tensor without elements has one empty chunk, so that every tensor has a block to do its bookkeeping.
constexpr int64_t list_chunks(int64_t numel, int64_t chunk_elems) {
  return numel > 0 ? (numel + chunk_elems - 1) / chunk_elems : 1;
}

// The table as 64-bit words: `records`, then the chunks of each tensor in order. Record must have members numel,
// chunk_elems and chunks; the last two are filled in here. `chunk_elems_of`: of a record.
template <class Record, class ChunkElems>
std::vector<int64_t> tensor_list_words(std::vector<Record>& records, ChunkElems&& chunk_elems_of) {
  static_assert(sizeof(Record) % sizeof(int64_t) == 0);
  size_t chunk_count = 0;
  for (Record& r : records) {
    r.chunk_elems = chunk_elems_of(r);
    r.chunks = static_cast<int32_t>(list_chunks(r.numel, r.chunk_elems));
    chunk_count += static_cast<size_t>(r.chunks);
  }
  const size_t record_words = records.size() * sizeof(Record) / sizeof(int64_t);
  std::vector<int64_t> words(record_words + chunk_count);
  if (!records.empty()) std::memcpy(words.data(), records.data(), records.size() * sizeof(Record));
  size_t next = record_words;
  for (size_t t = 0; t < records.size(); ++t)
    for (int32_t c = 0; c < records[t].chunks; ++c) {
      const ListChunk chunk{static_cast<int32_t>(t), c};
      std::memcpy(&words[next++], &chunk, sizeof chunk);
    }
  return words;
}
template <class Record> std::vector<int64_t> tensor_list_words(std::vector<Record>& records, int32_t chunk_elems) {
  return tensor_list_words(records, [&](const Record&) { return chunk_elems; });
}

}  // namespace warpsmith
