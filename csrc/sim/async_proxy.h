#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "device/host_hooks_sm90.h"
#include "device/tensor_map.h"

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
  bool async_proxy = true;          // false: store_async, whose write is an ordinary one
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

// What the asynchronous proxy knows of a block's shared memory. The rule for bytes that bulk copies or wgmma access:
//   - After an ordinary write: the thread that wrote, or the thread that issues the copy, executes fence.proxy.async
//     between the two. This holds where the proxy reads the bytes and where it overwrites them.
//   - After an ordinary read that a barrier orders before the copy: no fence. A read that is complete has its value.
// PTX ISA 8.6 "Proxies" and 8.9.5 "Causality Order": operations of two proxies on one address are ordered by a proxy
// fence on the path between them. CUTLASS's pipelines release a stage after ordinary reads without one.
//
// Stores through the vocabulary are known with their thread. Other ordinary writes show when the proxy accesses the
// bytes, by their hash: then any fence of the block since the proxy's last look counts. The thread sanitizer build
// knows every thread's writes and fences.
class ProxyView {
 public:
  void reset();
  void fence(uint64_t number) { last_fence_ = number; }  // numbers grow with time, over all blocks
  void stored(const Thread& by, const unsigned char* p, size_t bytes);
  void wrote(const Block& block, const unsigned char* p, size_t bytes);
  void will_write(const Block& block, const unsigned char* p, size_t bytes);  // a copy in flight
  // Checks, before a copy is issued by the running thread.
  void overwrites(const Block& block, const unsigned char* p, size_t bytes, const char* what, Site site);
  // Checks, as the copy reads or as the running thread issues it.
  void reads(const Block& block, const unsigned char* p, size_t bytes, const char* what, Site site);

 private:
  static constexpr size_t kChunkBytes = 16;  // the least that the proxy moves
  struct Chunk {
    uint64_t hash = 0;
    uint64_t looked = 0, stored = 0;  // the latest fence at the proxy's last look, and at the latest ordinary store
    int writer = -1;                  // thread of that store, -1: none since the last look
    bool known = false;
    bool awaited = false;  // the destination of a copy in flight
  };
  Chunk& chunk(size_t index);
  bool fenced(const Chunk& c, const Block& block) const;
  std::vector<Chunk> chunks_;
  std::vector<size_t> touched_;
  uint64_t last_fence_ = 0;
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
