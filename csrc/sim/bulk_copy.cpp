#include "sim/bulk_pieces.h"

namespace warpsmith::sim {
namespace {

// The copy engine's own place in the thread sanitizer's order of events: loads and global writes follow their issuer;
// reads of shared memory follow proxy fences and the engine's own writes only.
class EngineScope {
 public:
  explicit EngineScope([[maybe_unused]] int engine) {
#ifdef WARPSMITH_SIM_TSAN
    static void* engines[2] = {__tsan_create_fiber(0), __tsan_create_fiber(0)};
    before_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(engines[engine], __tsan_switch_to_fiber_no_sync);
#endif
  }
  ~EngineScope() {
#ifdef WARPSMITH_SIM_TSAN
    __tsan_switch_to_fiber(before_, __tsan_switch_to_fiber_no_sync);
#endif
  }

 private:
  [[maybe_unused]] void* before_ = nullptr;
};
constexpr int kWriter = 0, kReader = 1;
constexpr int64_t kSpinLimit = 1 << 22, kSpinsUntilAllStart = 1 << 10;

// The blocks that a load writes to.
std::vector<Block*> targets_of(const BulkOperation& op) {
  if (op.cluster_mask == 0) return {op.block};
  std::vector<Block*> targets;
  for (unsigned rank = 0; rank < op.block->cluster_size; ++rank)
    if (op.cluster_mask >> rank & 1) targets.push_back(op.block->cluster->blocks[rank]);
  return targets;
}

void execute_load(BulkOperation& op) {
  Untracked allocation;
  const uint32_t at = window_offset(op.shared), barrier_at = window_offset(op.barrier);
  for (Block* target : targets_of(op)) {
    if (!target->started) fail("bulk copy arrives in a block that has not started", op.site);
    if (target->live_threads == 0) fail("bulk copy arrives in a block that has exited", op.site);
    MbarrierState& barrier = mbarrier_of(*target, barrier_at, "bulk copy", op.site);
    unsigned char* to = target->arena + at;
    {
      EngineScope engine(kWriter);
      order_acquire(&op.issued);
      order_acquire(&op.read_order);
      for_each_piece(op, [&](uint32_t offset, unsigned char* from, int bytes) {
        unsigned char* piece = to + permuted(op, offset);
        note_write(piece, static_cast<size_t>(bytes));
        if (from) {
          note_read(from, static_cast<size_t>(bytes));
          copy_chunk(piece, from, bytes);
        } else {
          for (int i = 0; i < bytes; ++i) piece[i] = 0;
        }
      });
      order_release(&machine.engine_wrote);
      order_release(&machine.launch_ends);
      order_release(&barrier);
    }
    target->proxy_view.wrote(*target, to, static_cast<size_t>(op.bytes));
    complete_bytes(barrier, op.bytes, op.site);
  }
  op.read = op.done = true;
}

void execute_read(BulkOperation& op) {
  Untracked allocation;
  op.block->proxy_view.reads(*op.block, op.shared, static_cast<size_t>(op.bytes), "bulk store", op.site);
  op.staged.resize(static_cast<size_t>(op.bytes));
  EngineScope engine(kReader);
  order_acquire(&op.block->proxy_fences);
  order_acquire(&machine.engine_wrote);
  for_each_piece(op, [&](uint32_t offset, unsigned char*, int bytes) {
    const unsigned char* piece = op.shared + permuted(op, offset);
    note_read(piece, static_cast<size_t>(bytes));
    copy_chunk(op.staged.data() + offset, piece, bytes);
  });
  order_release(&op.read_order);
  op.read = true;
}

void execute_write(BulkOperation& op) {
  Untracked allocation;
  const Dtype dtype = op.tensor ? content_of(op.map, op.site).dtype : Dtype::float32;
  EngineScope engine(kWriter);
  order_acquire(&op.issued);
  for_each_piece(op, [&](uint32_t offset, unsigned char* to, int bytes) {
    if (!to) return;
    // Additions are atomic: they do not race with each other, so the sanitizer hears of plain writes only.
    if (op.add) {
      add_chunk(to, op.staged.data() + offset, bytes, dtype);
    } else {
      note_write(to, static_cast<size_t>(bytes));
      copy_chunk(to, op.staged.data() + offset, bytes);
    }
  });
  order_release(&op.written_order);
  order_release(&machine.launch_ends);
  op.done = true;
}

// At issue: what the copy reads or overwrites was written behind a fence. To the thread sanitizer an overwritten place
// is read by the engine that knows fences only: that races with ordinary writes that nobody fenced, and with no read.
void check_fences(BulkOperation& op) {
  const auto bytes = static_cast<size_t>(op.bytes);
  if (!op.load) return op.block->proxy_view.reads(*op.block, op.shared, bytes, "bulk store", op.site);
  for (Block* target : targets_of(op)) {
    unsigned char* to = target->arena + window_offset(op.shared);
    target->proxy_view.overwrites(*target, to, bytes, "bulk load", op.site);
    if constexpr (!kThreadSanitizer) continue;
    EngineScope engine(kReader);
    order_acquire(&target->proxy_fences);
    order_acquire(&machine.engine_wrote);
    note_read(to, bytes);
    order_release(&op.read_order);
  }
}

// One step of one copy.
void advance(BulkOperation& op) {
  if (op.load)
    execute_load(op);
  else if (!op.read)
    execute_read(op);
  else
    execute_write(op);
}

void issue(BulkOperation&& operation) {
  Thread& me = self();
  Untracked scope;
  BulkOperation& op = machine.bulk_operations.emplace_back(std::move(operation));
  if (!op.block) op.block = me.block;
  if (!op.load) me.open_bulk.push_back(&op);
  if (op.async_proxy) check_fences(op);
  order_release(&op.issued);
  const Timing timing = async_timing();
  if (timing == Timing::early || (timing == Timing::random && random_bits() % 2)) {
    while (!op.done) advance(op);
    return;
  }
  machine.in_flight.push_back(&op);
  if (!op.load) return;
  // Until it arrives, the destination holds NaN bytes in every receiving block.
  for (Block* target : targets_of(op)) {
    unsigned char* to = target->arena + window_offset(op.shared);
    for (int i = 0; i < op.bytes; ++i) to[i] = 0xff;
    target->proxy_view.will_write(*target, to, static_cast<size_t>(op.bytes));
  }
}

void check_shared(const void* shared, unsigned alignment, const char* what, Site site) {
  if (owner_of_shared(shared) != self().block)
    fail(std::string(what) + ": the buffer is not in this block's shared memory", site);
  if (window_offset(shared) % alignment)
    fail("cudaErrorMisalignedAddress: misaligned address: " + std::string(what) + " needs a buffer aligned to " +
             std::to_string(alignment) + " bytes",
         site);
}

// The engine sees an mbarrier only behind mbarrier_init_fence().
void check_barrier(void* barrier, const char* what, Site site) {
  mbarrier_at(barrier, what, site);
  if (owner_of_shared(barrier) != self().block)
    fail(std::string(what) + ": the mbarrier must be this block's own", site);
  if (!self().block->mbarriers_published) fail(std::string(what) + ": mbarrier_init_fence() is missing", site);
}

void check_linear(const void* global, const void* shared, int bytes, const char* what, Site site) {
  check_shared(shared, 16, what, site);
  if (bytes <= 0 || bytes % 16) fail(std::string(what) + ": the size must be a positive multiple of 16 bytes", site);
  if (reinterpret_cast<uintptr_t>(global) % 16)
    fail("cudaErrorMisalignedAddress: misaligned address: " + std::string(what) + " in global memory", site);
  if (in_shared(global)) fail(std::string(what) + ": expected global memory, got shared", site);
}

BulkOperation box_operation(const void* map, const int* coordinates, int rank, const char* what, Site site) {
  BulkOperation op;
  op.tensor = true;
  op.map = *static_cast<const TensorMap*>(map);
  op.rank = rank;
  op.site = site;
  for (int i = 0; i < rank; ++i) op.coordinates[i] = coordinates[i];
  if (rank < 1 || rank > 5) fail(std::string(what) + ": one to five coordinates", site);
  const TensorMapContent m = content_of(op.map, site);
  if (m.rank != rank)
    fail(std::string(what) + ": the tensor map has rank " + std::to_string(m.rank) + ", the copy " +
             std::to_string(rank),
         site);
  if (coordinates[0] * size_bytes(m.dtype) % 16)
    fail(std::string("cudaErrorIllegalInstruction: ") + what +
             ": the innermost coordinate must be a multiple of 16 bytes",
         site);
  op.bytes = size_bytes(m.dtype);
  for (int i = 0; i < rank; ++i) op.bytes *= m.box_minus_one[i] + 1;
  int64_t inside = 0;
  for_each_piece(op, [&](uint32_t, unsigned char* p, int bytes) { inside += p ? bytes : 0; });
  machine.tensor_bytes = inside;
  // An H200 reads the map's base for a box that lies outside altogether, and ends the kernel with "illegal address"
  // where nothing is mapped there (2026-11-29). The address sanitizer sees this read.
  if (inside == 0) (void)*static_cast<const volatile unsigned char*>(m.base);
  return op;
}
BulkOperation tensor_operation(const void* map, const int* coordinates, int rank, const void* shared, const char* what,
                               Site site) {
  BulkOperation op = box_operation(map, coordinates, rank, what, site);
  check_shared(shared, static_cast<unsigned>(device::swizzle_alignment_bytes(content_of(op.map, site).swizzle)), what,
               site);
  op.shared = static_cast<unsigned char*>(const_cast<void*>(shared));
  return op;
}

}  // namespace

bool run_some_async_work() {
  auto& flight = machine.in_flight;
  if (flight.empty()) return false;
  const size_t i = machine.options.seed ? random_bits() % flight.size() : 0;
  BulkOperation& op = *flight[i];
  if (!op.done) advance(op);
  if (op.done) {
    Untracked scope;
    flight.erase(flight.begin() + static_cast<ptrdiff_t>(i));
  }
  return true;
}

void begin_async_work() {
  machine.bulk_operations.clear();
  machine.in_flight.clear();
}

// Writes to global memory outlive their block. Loads do not: see unfinished_bulk_work().
void finish_async_work() {
  while (machine.error.empty() && run_some_async_work()) {}
}

const char* unfinished_bulk_work(const Thread& thread) {
  for (const auto& group : thread.bulk_groups)
    for (const BulkOperation* op : group)
      if (!op->read) return "thread exits before its bulk stores have read their source: bulk_wait_read() is missing";
  for (const BulkOperation* op : thread.open_bulk)
    if (!op->done) return "thread exits with bulk stores that were not committed";
  if (thread.block->live_threads == 1)
    for (const BulkOperation* op : machine.in_flight)
      if (op->load && op->block == thread.block)
        return "block exits while a bulk copy into its shared memory is in flight";
  return nullptr;
}

void bulk_load(void* shared, const void* global, int bytes, void* barrier, Site site) {
  if (!sm90_code()) return;
  check_linear(global, shared, bytes, "bulk_load", site);
  check_barrier(barrier, "bulk_load", site);
  machine.counters.global_bytes_read += bytes;
  machine.counters.shared_bytes_written += bytes;
  BulkOperation op;
  op.shared = static_cast<unsigned char*>(shared);
  op.global = static_cast<unsigned char*>(const_cast<void*>(global));
  op.bytes = bytes;
  op.barrier = barrier;
  op.site = site;
  issue(std::move(op));
}

// As a copy of 16 bytes that the issuing thread has at hand.
void store_async(void* remote, const void* sixteen_bytes, void* remote_barrier, Site site) {
  if (!sm90_code()) return;
  Block* target = owner_of_shared(remote);
  if (!target || target->cluster != self().block->cluster)
    fail("store_async: the destination is not in shared memory of this cluster", site);
  if (owner_of_shared(remote_barrier) != target) fail("store_async: the mbarrier is another block's", site);
  if (window_offset(remote) % 16)
    fail("cudaErrorMisalignedAddress: misaligned address: store_async needs 16-byte alignment", site);
  mbarrier_at(remote_barrier, "store_async", site);
  if (!target->mbarriers_published) fail("store_async: mbarrier_init_fence() is missing", site);
  machine.counters.shared_bytes_written += 16;
  BulkOperation op;
  const auto* bytes = static_cast<const unsigned char*>(sixteen_bytes);
  {
    Untracked scope;
    op.staged.assign(bytes, bytes + 16);
  }
  op.block = target;
  op.shared = static_cast<unsigned char*>(remote);
  op.global = op.staged.data();
  op.bytes = 16;
  op.async_proxy = false;
  op.barrier = remote_barrier;
  op.site = site;
  issue(std::move(op));
}

void bulk_store(void* global, const void* shared, int bytes, BulkKind kind, Site site) {
  if (!sm90_code()) return;
  check_linear(global, shared, bytes, "bulk_store", site);
  machine.counters.global_bytes_written += bytes;
  machine.counters.shared_bytes_read += bytes;
  BulkOperation op;
  op.load = false;
  op.add = kind == BulkKind::add_f32;
  op.shared = static_cast<unsigned char*>(const_cast<void*>(shared));
  op.global = static_cast<unsigned char*>(global);
  op.bytes = bytes;
  op.site = site;
  issue(std::move(op));
}

void tensor_load(void* shared, const void* map, const int* coordinates, int rank, void* barrier, unsigned cluster_mask,
                 Site site) {
  if (!sm90_code()) return;
  BulkOperation op = tensor_operation(map, coordinates, rank, shared, "tensor_load", site);
  op.barrier = barrier;
  op.cluster_mask = cluster_mask;
  check_barrier(barrier, "tensor_load", site);
  if (cluster_mask >> self().block->cluster_size)
    fail("tensor_load_multicast: the mask names blocks outside the cluster", site);
  machine.counters.global_bytes_read += machine.tensor_bytes;
  machine.counters.shared_bytes_written += op.bytes;
  issue(std::move(op));
}

// Moves nothing. The address sanitizer's build refuses bytes outside of an allocation.
void tensor_prefetch(const void* map, const int* coordinates, int rank, Site site) {
  if (!sm90_code()) return;
  [[maybe_unused]] const BulkOperation op = box_operation(map, coordinates, rank, "tensor_prefetch", site);
#if defined(__SANITIZE_ADDRESS__)
  for_each_piece(op, [&](uint32_t, unsigned char* p, int bytes) {
    if (p && __asan_region_is_poisoned(p, static_cast<size_t>(bytes)))
      fail("tensor_prefetch: bytes outside of an allocation", site);
  });
#endif
}

void tensor_store(const void* map, const int* coordinates, int rank, const void* shared, bool add, Site site) {
  if (!sm90_code()) return;
  BulkOperation op = tensor_operation(map, coordinates, rank, shared, "tensor_store", site);
  for (int i = 0; i < rank; ++i)
    if (coordinates[i] < 0)
      fail("cudaErrorIllegalInstruction: tensor_store and tensor_add: coordinates must not be negative", site);
  op.load = false;
  op.add = add;
  machine.counters.global_bytes_written += machine.tensor_bytes;
  machine.counters.shared_bytes_read += op.bytes;
  issue(std::move(op));
}

void bulk_commit() {
  if (!sm90_code()) return;
  Thread& me = self();
  Untracked scope;
  me.bulk_groups.push_back(std::move(me.open_bulk));
  me.open_bulk.clear();
}

void bulk_wait(int groups_in_flight, bool reads_only, Site) {
  if (!sm90_code()) return;
  auto& groups = self().bulk_groups;
  const int complete = static_cast<int>(groups.size()) - groups_in_flight;
  for (int i = 0; i < complete; ++i)
    for (BulkOperation* op : groups[static_cast<size_t>(i)]) {
      if (!op->read) execute_read(*op);
      order_acquire(&op->read_order);
      if (reads_only) continue;
      if (!op->done) execute_write(*op);
      order_acquire(&op->written_order);
    }
  if (reads_only || complete <= 0) return;
  Untracked scope;
  groups.erase(groups.begin(), groups.begin() + complete);
}

void proxy_fence() {
  if (!sm90_code()) return;
  Thread& me = self();
  order_release(&me.block->proxy_fences);
  me.block->proxy_view.fence(me.proxy_fence = ++machine.proxy_fences);
}

void proxy_reads_chunks(Block& block, const uint32_t* offsets, size_t count, const char* what, Site site) {
  for (size_t i = 0; i < count; ++i) block.proxy_view.reads(block, block.arena + offsets[i], 16, what, site);
  if constexpr (!kThreadSanitizer) return;
  EngineScope engine(kReader);
  order_acquire(&block.proxy_fences);
  order_acquire(&machine.engine_wrote);
  for (size_t i = 0; i < count; ++i) note_read(block.arena + offsets[i], 16);
  order_release(&block.operand_reads);
}

void spin_pause() {
  if (++machine.spins > kSpinLimit) fail("spins without end: what it waits for never happens", {});
  if (machine.spins == kSpinsUntilAllStart) start_withheld_blocks();
  if (machine.options.seed == 0 || random_bits() % 4 == 0) run_some_async_work();
  yield(0);  // stands back: what it waits for may come from the least favoured thread
}

void acquire_access(const void* pointer) { order_acquire(const_cast<void*>(pointer)); }
void release_access(void* pointer) {
  machine.spins = 0;
  order_release(pointer);
}

}  // namespace warpsmith::sim
