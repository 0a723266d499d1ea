#pragma once
#include <torch/csrc/stable/library.h>

#include <string>

namespace warpsmith {

// A list of ops, which one library of torch's reads for their schemas and others for their implementations.
class OpList {
 public:
  using Library = torch::stable::detail::StableLibrary;
  using Boxed = void(StableIValue*, uint64_t, uint64_t);

  OpList(Library& library, bool of_schemas) : library_(library), of_schemas_(of_schemas) {}

  // schema: "axpby(Tensor x, Tensor y) -> Tensor".
  void add(const std::string& schema, Boxed* boxed) {
    if (of_schemas_)
      library_.def(schema.c_str());
    else
      library_.impl(schema.substr(0, schema.find('(')).c_str(), boxed);
  }

  // An op by its public name, which graphs hold, and as `name`_forward, which eager mode calls.
  void add_forward(const std::string& name, const std::string& signature, Boxed* boxed) {
    add(name + signature, boxed);
    add(name + "_forward" + signature, boxed);
  }

 private:
  Library& library_;
  bool of_schemas_;
};

}  // namespace warpsmith

// Registers ops: the schema of each (once), and its implementation for the devices of this build. Used at namespace
// scope:
//
//   WARPSMITH_OPS(m) { m.add("axpby(Tensor x, Tensor y) -> Tensor", TORCH_BOX(&axpby)); }
#define WARPSMITH_OPS(m) WARPSMITH_OPS_OF_(warpsmith_ops, WARPSMITH_ON_DEVICES_, m)

// The same of ops without tensors.
#define WARPSMITH_HOST_OPS(m) WARPSMITH_OPS_OF_(warpsmith_host_ops, WARPSMITH_ON_HOST_, m)

#define WARPSMITH_OPS_OF_(function, IMPLEMENTATIONS, m)                            \
  void function(::warpsmith::OpList m);                                            \
  STABLE_TORCH_LIBRARY_FRAGMENT(warpsmith, library) { function({library, true}); } \
  IMPLEMENTATIONS(function)                                                        \
  void function(::warpsmith::OpList m)

#define WARPSMITH_FOR_KEY_(function, key) \
  STABLE_TORCH_LIBRARY_IMPL(warpsmith, key, library) { function({library, false}); }

#ifdef WARPSMITH_CUDA
#define WARPSMITH_ON_DEVICES_(function) WARPSMITH_FOR_KEY_(function, CPU) WARPSMITH_FOR_KEY_(function, CUDA)
#else
#define WARPSMITH_ON_DEVICES_(function) WARPSMITH_FOR_KEY_(function, CPU)
#endif
#define WARPSMITH_ON_HOST_(function) WARPSMITH_FOR_KEY_(function, CompositeExplicitAutograd)
