#pragma once
#include <cstdint>

// A family declares its ops once, in a macro of rows: `#define FAMILY_OPS(ROW) ROW(first_op, ...) ROW(second_op, ...)`.
// WARPSMITH_DEFINE_OPS(Enum, FAMILY_OPS) makes from it, in the current namespace:
//
//   enum class Enum { first_op, second_op };
//   name(op)           "first_op": begins the op's error messages
//   backward_name(op)  "first_op_backward"
#define WARPSMITH_OP_ENUMERATOR_(op, ...) op,
#define WARPSMITH_OP_NAME_(op, ...) #op,
#define WARPSMITH_OP_BACKWARD_NAME_(op, ...) #op "_backward",
#define WARPSMITH_DEFINE_OPS(Enum, OPS)                                 \
  enum class Enum : uint8_t { OPS(WARPSMITH_OP_ENUMERATOR_) };          \
  constexpr const char* name(Enum op) {                                 \
    constexpr const char* names[] = {OPS(WARPSMITH_OP_NAME_)};          \
    return names[static_cast<int>(op)];                                 \
  }                                                                     \
  constexpr const char* backward_name(Enum op) {                        \
    constexpr const char* names[] = {OPS(WARPSMITH_OP_BACKWARD_NAME_)}; \
    return names[static_cast<int>(op)];                                 \
  }
