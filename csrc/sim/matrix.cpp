#include <cstring>

#include "device/convert.h"
#include "device/float8.h"
#include "sim/machine.h"

// Warp-level matrix instructions and matrix loads. The layouts are stated in device/mma.h and device/matrix_access.h.
namespace warpsmith::sim {

namespace {

template <class T> void widen_all(const unsigned char* from, int count, float* out, int stride) {
  for (int i = 0; i < count; ++i) {
    T element;
    std::memcpy(&element, from + i * static_cast<int>(sizeof(T)), sizeof(T));
    out[i * stride] = device::to_float(element);
  }
}

}  // namespace

void widen(const unsigned char* from, int count, Operand type, float* out, int stride) {
  switch (type) {
    case Operand::f16: return widen_all<float16>(from, count, out, stride);
    case Operand::bf16: return widen_all<bfloat16>(from, count, out, stride);
    case Operand::e4m3: return widen_all<float8_e4m3>(from, count, out, stride);
    case Operand::e5m2: return widen_all<float8_e5m2>(from, count, out, stride);
  }
}

void unpack_fragment(const uint32_t* registers, int count, Operand type, int lane, float (*out)[32]) {
  const int per_register = 4 / operand_bytes(type);
  for (int i = 0; i < count; ++i) {
    // Four registers: rows in turns. Two: the operand's rows are columns of B.
    const int row = count == 4 ? lane / 4 + 8 * (i & 1) : lane / 4, half = count == 4 ? i >> 1 : i;
    float* first = out[row] + per_register * (lane % 4 + 4 * half);
    widen(reinterpret_cast<const unsigned char*>(registers + i), per_register, type, first, 1);
  }
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
  Operand a_type, b_type;
};

void mma_all(void* const* arguments, unsigned) {
  float a[16][32], b[8][32], d[16][8];  // by rows of A, columns of B
  const int depth = 32 / operand_bytes(static_cast<const Mma*>(arguments[0])->a_type);
  for (int lane = 0; lane < 32; ++lane) {
    const auto& m = *static_cast<const Mma*>(arguments[lane]);
    unpack_fragment(m.a, 4, m.a_type, lane, a);
    unpack_fragment(m.b, 2, m.b_type, lane, b);
    for (int i = 0; i < 4; ++i) d[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)] = m.d[i];
  }
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column)
      for (int k = 0; k < depth; ++k) d[row][column] += a[row][k] * b[column][k];
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

void mma(float* d, const uint32_t* a, const uint32_t* b, Operand a_type, Operand b_type, Site site) {
  if (operand_bytes(a_type) == 1 && machine.options.properties.code_capability < 89)
    fail("mma of 8-bit floats: code below sm_89 traps", site);
  Mma m{d, a, b, a_type, b_type};
  warp_operation(kWholeWarp, mma_all, &mma_identity, &m, "mma", site);
  if (self().lane == 0) count_flops(int64_t{2} * 16 * 8 * (32 / operand_bytes(a_type)));
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
  if (!sm90_code()) fail("store_matrix: code below sm_90 traps", site);
  check_row(row, matrices, "store_matrix", site);
  MatrixAccess m{const_cast<uint32_t*>(registers), static_cast<unsigned char*>(row)};
  if (self().lane < 8 * matrices) {
    note_write(row, 16);
    note_ordinary_store(row, 16);
    machine.counters.shared_bytes_written += 16;
  }
  const WarpOperation operation = access_operation<true>(matrices, transposed);
  warp_operation(kWholeWarp, operation, reinterpret_cast<const void*>(operation), &m, "store_matrix", site);
}

}  // namespace warpsmith::sim
