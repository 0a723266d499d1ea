#pragma once
#include <stdexcept>
#include <string>

#include "common/status.h"

namespace warpsmith {

// Every refusal states op, argument, what was expected and what was given. It reaches Python as a ValueError with
// exactly this text.
[[noreturn]] inline void refuse(const char* op, const char* argument, const std::string& expected,
                                const std::string& got) {
  throw std::invalid_argument(std::string(op) + ": " + argument + ": expected " + expected + ", got " + got);
}

// Before torch 2.13 the reason of a failed call does not cross the stable ABI, so an allocation failure names itself.
// Python turns this text back into torch.OutOfMemoryError (ops/_library.py).
inline constexpr const char* kOutOfMemory = "out of memory: ";

// The only place where a native failure becomes an exception.
inline void raise_if_failed(const char* op, const Status& status) {
  switch (status.kind()) {
    case Status::Kind::ok: return;
    case Status::Kind::invalid_argument:
    case Status::Kind::unsupported: throw std::invalid_argument(std::string(op) + ": " + status.what());
    case Status::Kind::out_of_memory: throw std::runtime_error(std::string(op) + ": " + kOutOfMemory + status.what());
    case Status::Kind::device: throw std::runtime_error(std::string(op) + ": " + status.what());
  }
}

}  // namespace warpsmith
