#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/tensor_map.h"
#include "device/host_hooks_sm90.h"

// The asynchronous proxy: bulk copies in flight, mbarriers, and which shared memory it has seen. Internal to csrc/sim.
namespace warpsmith::sim {

struct Block;
struct Thread;

struct MbarrierState {
  int arrivals = 0;          // that complete a phase
  int pending_arrivals = 0;  // of the current phase
  int64_t pending_bytes = 0;
  uint64_t phase = 0;
  std::vector<Thread*> waiting;
};

// A bulk copy. One of loads counts on mbarriers; stores belong to their issuer's groups and happen in two steps: the
// source is read, then the destination is written.
struct BulkOperation {
  bool load = true;
  bool tensor = false;
  bool add = false;
  unsigned char* shared = nullptr;  // in the issuing block
  unsigned char* global = nullptr;
  int bytes = 0;
  TensorMap map{};
  int rank = 0;
  int coordinates[5] = {};
  void* barrier = nullptr;
  unsigned cluster_mask = 0;  // 0: only the issuing block
  Block* block = nullptr;
  Site site{};
  std::vector<unsigned char> staged;
  bool read = false, done = false;
  char issued = 0, read_order = 0, written_order = 0;  // ordering objects
};

// A tensor map as csrc/sim encodes it.
struct TensorMapContent {
  unsigned char* base;
  int64_t sizes[5], strides_bytes[4];
  uint16_t box_minus_one[5];
  Dtype dtype;
  device::Swizzle swizzle;
  uint8_t rank;
  uint8_t magic;
};
static_assert(sizeof(TensorMapContent) <= sizeof(TensorMap));
TensorMapContent content_of(const TensorMap& map, Site site);

// Which bytes the asynchronous proxy knows: it wrote them, or they were read behind a proxy fence. Ordinary writes are
// not seen as they happen, so changed bytes are found by hash when they are read: some thread must have fenced since
// the last look. The thread sanitizer build knows each thread's fences exactly.
class ProxyView {
 public:
  void reset();
  void fence() { ++fences_; }
  void wrote(const Block& block, const unsigned char* p, size_t bytes);
  void will_write(const Block& block, const unsigned char* p, size_t bytes);  // a copy in flight
  void reads(const Block& block, const unsigned char* p, size_t bytes, const char* what, Site site);

 private:
  static constexpr size_t kChunkBytes = 16;  // the least that the proxy moves
  struct Chunk {
    uint64_t hash = 0;
    uint32_t fences = 0;
    bool known = false;
    bool awaited = false;  // the destination of a copy in flight
  };
  Chunk& chunk(size_t index);
  std::vector<Chunk> chunks_;
  std::vector<size_t> touched_;
  uint32_t fences_ = 0;
};

// Runs a piece of the work in flight; false if there is none. The scheduler calls it when no thread can run (late), and
// by seed.
bool run_some_async_work();
void begin_async_work();
void finish_async_work();

// What keeps a thread from exiting, or null.
const char* unfinished_bulk_work(const Thread& thread);

MbarrierState& mbarrier_of(Block& block, uint32_t offset, const char* what, Site site);
// Of the running thread's cluster.
MbarrierState& mbarrier_at(void* barrier, const char* what, Site site);
void complete_bytes(MbarrierState& barrier, int64_t bytes, Site site);
std::string describe_mbarrier(const Block& block, int offset);

// The proxy reads 16 bytes at each of these offsets of the block's shared memory: checked, and told to the thread
// sanitizer.
void proxy_reads_chunks(Block& block, const uint32_t* offsets, size_t count, const char* what, Site site);

}  // namespace warpsmith::sim
