#include <cstring>

#include "sim/machine.h"

namespace warpsmith::sim {
namespace {

constexpr uint8_t kMagic = 0xa7;

}  // namespace

void encode_tensor_map(TensorMap& out, const TensorMapSpec& spec) {
  TensorMapContent c{};
  c.base = static_cast<unsigned char*>(const_cast<void*>(spec.base));
  for (int i = 0; i < spec.rank; ++i) {
    c.sizes[i] = spec.sizes[i];
    if (i > 0) c.strides_bytes[i - 1] = spec.strides_bytes[i];
    c.box_minus_one[i] = static_cast<uint16_t>(spec.box[i] - 1);
  }
  c.dtype = spec.dtype;
  c.swizzle = spec.swizzle;
  c.rank = static_cast<uint8_t>(spec.rank);
  c.magic = kMagic;
  std::memcpy(&out, &c, sizeof c);
}

TensorMapContent content_of(const TensorMap& map, Site site) {
  TensorMapContent c;
  std::memcpy(&c, &map, sizeof c);
  if (c.magic != kMagic) fail("the tensor map was not made by make_tensor_map()", site);
  return c;
}

}  // namespace warpsmith::sim
