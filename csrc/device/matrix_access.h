#pragma once
#include <cstdint>

#include "device/platform.h"
#ifdef WARPSMITH_SIM
#include "device/host_hooks_sm90.h"
#endif

// 8 x 8 matrices of 16-bit elements between shared memory and registers. The whole warp, converged. Lane l gives the
// address of row l % 8 of matrix l / 8 (lanes beyond 8 * Matrices give any valid address); rows are 16 bytes, 16-byte
// aligned. Register i of lane l holds, of matrix i, row l / 4, columns 2 (l % 4) and the next; `Transposed`: rows and
// columns exchanged. Loads and stores of ordinary memory: barriers order them. PTX ISA 9.7.14.5.15
// "ldmatrix", 9.7.14.5.16 "stmatrix".
namespace warpsmith::device {

template <bool Transposed = false, int Matrices>
__device__ __forceinline__ void load_matrix(uint32_t (&r)[Matrices], const void* row WARPSMITH_SITE) {
  static_assert(Matrices == 1 || Matrices == 2 || Matrices == 4);
#ifdef WARPSMITH_SIM
  sim::load_matrix(r, Matrices, Transposed, row, site);
#else
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (Matrices == 4 && Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else if constexpr (Matrices == 4)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else if constexpr (Matrices == 2 && Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
  else if constexpr (Matrices == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
  else if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at) : "memory");
#endif
}

// sm_90 and newer.
template <bool Transposed = false, int Matrices>
__device__ __forceinline__ void store_matrix(void* row, const uint32_t (&r)[Matrices] WARPSMITH_SITE) {
  static_assert(Matrices == 1 || Matrices == 2 || Matrices == 4);
#ifdef WARPSMITH_SIM
  sim::store_matrix(r, Matrices, Transposed, row, site);
#elif __CUDA_ARCH__ >= 900
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (Matrices == 4 && Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  else if constexpr (Matrices == 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  else if constexpr (Matrices == 2 && Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(r[0]), "r"(r[1])
                 : "memory");
  else if constexpr (Matrices == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(r[0]), "r"(r[1]) : "memory");
  else if constexpr (Transposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(at), "r"(r[0]) : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(at), "r"(r[0]) : "memory");
#else
  __trap();  // the launcher chooses this path for sm_90 only
#endif
}

}  // namespace warpsmith::device
