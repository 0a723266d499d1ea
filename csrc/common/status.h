#pragma once
#include <cstdint>
#include <string>
#include <utility>

namespace warpsmith {

// What native code returns: ok, or the kind of failure and one sentence that tells the user what to do. Nothing is
// thrown below csrc/bindings, which turns a failure into one exception: invalid_argument and unsupported into
// ValueError, out_of_memory into torch.OutOfMemoryError, device into RuntimeError.
class [[nodiscard]] Status {
 public:
  enum class Kind : uint8_t { ok, invalid_argument, unsupported, out_of_memory, device };

  Status() = default;
  static Status failure(Kind kind, std::string what) {
    Status s;
    s.kind_ = kind;
    s.what_ = std::move(what);
    return s;
  }
  static Status unsupported(std::string what) { return failure(Kind::unsupported, std::move(what)); }
  static Status device(std::string what) { return failure(Kind::device, std::move(what)); }

  bool ok() const { return kind_ == Kind::ok; }
  Kind kind() const { return kind_; }
  const std::string& what() const { return what_; }

 private:
  Kind kind_ = Kind::ok;
  std::string what_;
};

// Returns a failure to the caller unchanged.
#define WARPSMITH_RETURN_IF_FAILED(expression)                                     \
  do {                                                                             \
    if (::warpsmith::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

}  // namespace warpsmith
