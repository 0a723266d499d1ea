#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <string>

// Whether products are ours: what WARPSMITH_OWN_PRODUCT says, or was said since. "auto": where ours was measured to
// pay. "1": wherever it can run; on the CPU products of 8-bit floats then have the bits of Hopper's. "128" or "256":
// that, with tiles of so many rows where they are compiled. Else never.
namespace warpsmith {

constexpr int kNeverOwn = -1, kOwnByAnyTile = 0, kOwnWhereItPays = 1;  // others: rows of the tile
inline int own_product_number(const char* how) {
  const std::string text = how && *how ? how : "auto";
  return text == "auto"                   ? kOwnWhereItPays
         : text == "1"                    ? kOwnByAnyTile
         : text == "128" || text == "256" ? std::stoi(text)
                                          : kNeverOwn;
}
inline std::atomic<int>& own_product_asked() {
  static std::atomic<int> number{own_product_number(std::getenv("WARPSMITH_OWN_PRODUCT"))};
  return number;
}
inline std::atomic<int64_t>& own_products_launched() {
  static std::atomic<int64_t> count{0};
  return count;
}
inline bool own_product_is_wanted_everywhere() {
  const int asked = own_product_asked();
  return asked != kNeverOwn && asked != kOwnWhereItPays;
}

}  // namespace warpsmith
