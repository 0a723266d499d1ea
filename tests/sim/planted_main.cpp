#include <cstdio>

#include "planted.h"

namespace warpsmith::test {
namespace {

struct Planted {
  const char *name, *variant, *expected;
  std::string (*run)(bool bug);
};

std::vector<Planted>& all() {
  static std::vector<Planted> list;
  return list;
}

}  // namespace

PlantedRegistration::PlantedRegistration(const char* name, const char* variant, const char* expected,
                                         std::string (*run)(bool)) {
  all().push_back({name, variant, expected, run});
}

}  // namespace warpsmith::test

// `program` lists "name|variant|expected text"; `program NAME [--fixed]` runs one under eight schedule seeds, or until
// something is noticed.
int main(int argc, char** argv) {
  using namespace warpsmith;
  if (argc < 2) {
    for (const auto& p : test::all()) std::printf("%s|%s|%s\n", p.name, p.variant, p.expected);
    return 0;
  }
  const bool bug = argc < 3 || std::string(argv[2]) != "--fixed";
  for (const auto& p : test::all()) {
    if (std::string(p.name) != argv[1]) continue;
    for (uint64_t seed = 0; seed < 8; ++seed) {
      sim::options().seed = seed;
      const std::string noticed = p.run(bug);
      if (noticed.empty()) continue;
      std::printf("noticed under schedule seed %d: %s\n", static_cast<int>(seed), noticed.c_str());
      return 1;
    }
    return 0;
  }
  std::printf("no planted bug '%s'\n", argv[1]);
  return 2;
}
