#include <bit>
#include <cstring>

#include "device/convert.h"
#include "sim/machine.h"

// Warp-level matrix instructions and matrix loads. The layouts are stated in device/mma.h and device/matrix_access.h.
namespace warpsmith::sim {

float half_to_float(uint16_t bits, bool bfloat) {
  return bfloat ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
                : static_cast<float>(std::bit_cast<_Float16>(bits));
}

// Eight lanes' 16-byte rows go through the 32 banks in one pass, unless two rows share a bank.
int64_t bank_conflicts_of_rows(const void* const* rows) {
  int uses[8] = {}, most = 0;
  for (int r = 0; r < 8; ++r) {
    bool repeated = false;  // the same address is one access
    for (int s = 0; s < r; ++s) repeated = repeated || rows[s] == rows[r];
    if (!repeated) most = std::max(most, ++uses[window_offset(rows[r]) / 16 % 8]);
  }
  return most - 1;
}

namespace {

struct Mma {
  float* d;
  const uint32_t *a, *b;
  bool bfloat;
};

void mma_all(void* const* arguments, unsigned) {
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const Mma*>(arguments[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const auto element = [&](uint32_t r) {
        return half_to_float(static_cast<uint16_t>(half ? r >> 16 : r), m.bfloat);
      };
      for (int i = 0; i < 4; ++i) a[g + 8 * (i & 1)][2 * t + half + 8 * (i >> 1)] = element(m.a[i]);
      for (int i = 0; i < 2; ++i) b[2 * t + half + 8 * i][g] = element(m.b[i]);
      for (int i = 0; i < 2; ++i) d[g + 8 * i][2 * t + half] = m.d[2 * i + half];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column)
      for (int k = 0; k < 16; ++k) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const Mma*>(arguments[lane]);
    for (int i = 0; i < 4; ++i) m.d[i] = d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)];
  }
}

struct MatrixAccess {
  uint32_t* registers;
  unsigned char* row;
};

template <bool Store, bool Transposed> void access_all(void* const* arguments, int matrices) {
  for (int matrix = 0; matrix < matrices; ++matrix) {
    const void* rows[8];
    for (int r = 0; r < 8; ++r) rows[r] = static_cast<const MatrixAccess*>(arguments[matrix * 8 + r])->row;
    machine.counters.bank_conflicts += bank_conflicts_of_rows(rows);
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t& value = static_cast<const MatrixAccess*>(arguments[lane])->registers[matrix];
      for (int half = 0; half < 2; ++half) {
        int r = lane / 4, c = 2 * (lane % 4) + half;
        if (Transposed) std::swap(r, c);
        unsigned char* at = static_cast<const MatrixAccess*>(arguments[matrix * 8 + r])->row + 2 * c;
        uint16_t element;
        if (Store) {
          element = static_cast<uint16_t>(value >> (16 * half));
          std::memcpy(at, &element, 2);
        } else {
          std::memcpy(&element, at, 2);
          value = half ? (value & 0xffffu) | static_cast<uint32_t>(element) << 16 : element;
        }
      }
    }
  }
}

template <bool Store, bool Transposed, int Matrices> void access_matrices(void* const* arguments, unsigned) {
  access_all<Store, Transposed>(arguments, Matrices);
}

template <bool Store> WarpOperation access_operation(int matrices, bool transposed) {
  if (matrices == 1) return transposed ? access_matrices<Store, true, 1> : access_matrices<Store, false, 1>;
  if (matrices == 2) return transposed ? access_matrices<Store, true, 2> : access_matrices<Store, false, 2>;
  return transposed ? access_matrices<Store, true, 4> : access_matrices<Store, false, 4>;
}

const char mma_identity = 0;

// Only the lanes whose address is used must give a valid one.
void check_row(const void* row, int matrices, const char* what, Site site) {
  if (self().lane >= 8 * matrices) return;
  if (reinterpret_cast<uintptr_t>(row) % 16)
    fail("cudaErrorMisalignedAddress: misaligned address: " + std::string(what) + " needs rows aligned to 16 bytes",
         site);
  if (owner_of_shared(row) != self().block)
    fail(std::string(what) + ": the row is not in this block's shared memory", site);
}

}  // namespace

void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool bfloat, Site site) {
  Mma m{d, a, b, bfloat};
  warp_operation(kWholeWarp, mma_all, &mma_identity, &m, "mma", site);
  if (self().lane == 0) count_flops(2 * 16 * 8 * 16);
}

void load_matrix(uint32_t* registers, int matrices, bool transposed, const void* row, Site site) {
  check_row(row, matrices, "load_matrix", site);
  MatrixAccess m{registers, static_cast<unsigned char*>(const_cast<void*>(row))};
  if (self().lane < 8 * matrices) {
    note_read(row, 16);
    machine.counters.shared_bytes_read += 16;
  }
  const WarpOperation operation = access_operation<false>(matrices, transposed);
  warp_operation(kWholeWarp, operation, reinterpret_cast<const void*>(operation), &m, "load_matrix", site);
}

void store_matrix(const uint32_t* registers, int matrices, bool transposed, void* row, Site site) {
  check_row(row, matrices, "store_matrix", site);
  MatrixAccess m{const_cast<uint32_t*>(registers), static_cast<unsigned char*>(row)};
  if (self().lane < 8 * matrices) {
    note_write(row, 16);
    machine.counters.shared_bytes_written += 16;
  }
  const WarpOperation operation = access_operation<true>(matrices, transposed);
  warp_operation(kWholeWarp, operation, reinterpret_cast<const void*>(operation), &m, "store_matrix", site);
}

}  // namespace warpsmith::sim
