#pragma once
#include "device/host_hooks.h"

// Hooks of the Hopper vocabulary and of matrix instructions; see device/host_hooks.h.
namespace warpsmith::sim {

// Types of matrix operands. 32 bytes of K are one instruction: 16 or 32 elements.
enum class Operand : uint8_t { f16, bf16, e4m3, e5m2 };
constexpr int operand_bytes(Operand t) { return t == Operand::f16 || t == Operand::bf16 ? 2 : 1; }
template <class T> inline constexpr Operand kOperand = Operand::f16;
template <> inline constexpr Operand kOperand<bfloat16> = Operand::bf16;
template <> inline constexpr Operand kOperand<float8_e4m3> = Operand::e4m3;
template <> inline constexpr Operand kOperand<float8_e5m2> = Operand::e5m2;

// Matrix instructions of one warp.
void mma(float* d, const uint32_t* a, const uint32_t* b, Operand a_type, Operand b_type, Site site);
void load_matrix(uint32_t* registers, int matrices, bool transposed, const void* row, Site site);
void store_matrix(const uint32_t* registers, int matrices, bool transposed, void* row, Site site);

// mbarriers.
void mbarrier_init(void* barrier, int arrivals, Site site);
void mbarrier_arrive(void* barrier, int arrivals, int expected_bytes, Site site);
void mbarrier_arrive_expect(void* barrier, int bytes, Site site);
void mbarrier_arrive_remote(void* remote, Site site);
void mbarrier_wait(void* barrier, unsigned parity, Site site);
bool mbarrier_test(void* barrier, unsigned parity, Site site);
void mbarrier_init_fence();

// Proxies and ordered access.
void proxy_fence();
void spin_pause();
void acquire_access(const void* pointer);
void release_access(void* pointer);

// Bulk copies. TensorMap content is csrc/sim's own.
enum class BulkKind { plain, add_f32 };
void bulk_load(void* shared, const void* global, int bytes, void* barrier, Site site);
void bulk_store(void* global, const void* shared, int bytes, BulkKind kind, Site site);
void tensor_load(void* shared, const void* map, const int* coordinates, int rank, void* barrier, unsigned cluster_mask,
                 Site site);
void tensor_prefetch(const void* map, const int* coordinates, int rank, Site site);
void tensor_store(const void* map, const int* coordinates, int rank, const void* shared, bool add, Site site);
void bulk_commit();
void bulk_wait(int groups_in_flight, bool reads_only, Site site);

// Clusters.
void cluster_arrive(Site site);
void cluster_wait(Site site);
void* cluster_shared(const void* shared, unsigned rank, Site site);
void store_async(void* remote, const void* sixteen_bytes, void* remote_barrier, Site site);

// Warpgroup matrix instructions.
struct WgmmaOperands {
  float* d;
  int n;
  const uint32_t* a_registers;  // null: A is in shared memory
  uint64_t a, b;                // descriptors
  bool a_mn_major, b_mn_major, accumulate;
  Operand a_type, b_type;
};
void wgmma(const WgmmaOperands& operands, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int groups_in_flight, Site site);
void set_register_budget(int registers, bool increase, Site site);

}  // namespace warpsmith::sim
