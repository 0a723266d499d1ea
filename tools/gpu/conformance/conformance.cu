#include "conformance.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "conversions.cuh"
#include "copies.cuh"
#include "float8.cuh"
#include "products.cuh"
#include "warps.cuh"
#ifdef WARPSMITH_SIM
#include "sim/sim.h"
#else
#include "device/code_probe.cu"  // which launches ask
#endif

// Usage: `conformance record FILE` on a card, `conformance check FILE [stride]` anywhere (every stride-th seed of each
// primitive), `conformance list`. A vector is one line: primitive, seed, then a 32-bit hash or the results in
// hexadecimal. vectors.py packs the lines.
namespace warpsmith::conformance {
namespace {

uint32_t hash_of(const std::vector<unsigned char>& bytes) {  // FNV-1a of 64 bits, folded to 32
  uint64_t h = 0xcbf29ce484222325ull;
  for (unsigned char b : bytes) h = (h ^ b) * 0x100000001b3ull;
  return static_cast<uint32_t>(h ^ h >> 32);
}

Output run(const Case& c, int seed) {
  uint64_t salt = 0;
  for (const char* p = c.primitive; *p; ++p) salt = salt * 131 + static_cast<unsigned char>(*p);
  Inputs in(salt * 1000003 + static_cast<uint64_t>(seed));
  Output out;
  c.run(in, out);
#ifndef WARPSMITH_SIM
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) out.error = cudaGetErrorString(error);
#endif
  return out;
}

std::string text_of(const Output& out) {
  char piece[32];
  if (out.approximate.empty()) {
    std::snprintf(piece, sizeof piece, "%08x", hash_of(out.exact));
    return piece;
  }
  std::string text;
  for (float f : out.approximate) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    std::snprintf(piece, sizeof piece, "%08x", u);
    text += piece;
  }
  return text;
}

bool close(float actual, float expected, const Case& c) {
  if (actual != actual || expected != expected) return actual != actual && expected != expected;
  if (actual == expected) return true;
  if (std::isinf(actual) || std::isinf(expected)) return false;
  return std::fabs(static_cast<double>(actual) - expected) <=
         c.relative * std::fabs(static_cast<double>(expected)) + c.absolute;
}

bool matches(const Case& c, const Output& out, const std::string& stored) {
  if (out.approximate.empty()) return text_of(out) == stored;
  if (stored.size() != 8 * out.approximate.size()) return false;
  for (size_t i = 0; i < out.approximate.size(); ++i) {
    const auto u = static_cast<uint32_t>(std::strtoul(stored.substr(8 * i, 8).c_str(), nullptr, 16));
    float expected;
    std::memcpy(&expected, &u, 4);
    if (!close(out.approximate[i], expected, c)) return false;
  }
  return true;
}

std::string machine() {
#ifdef WARPSMITH_SIM
  return "host execution layer";
#else
  cudaDeviceProp properties{};
  int device = 0, driver = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess)
    return "no device";
  return std::string(properties.name) + ", driver " + std::to_string(driver) + ", toolkit " +
         std::to_string(CUDART_VERSION);
#endif
}

// One primitive's vectors to standard output; anything else that it prints begins with "error".
int vectors_of(const std::string& primitive) {
  for (const Case& c : cases()) {
    if (primitive != c.primitive) continue;
    for (int seed = 0; seed < c.seeds; ++seed) {
      const Output out = run(c, seed);
      if (!out.error.empty()) {
        std::printf("error %s seed %d: %s\n", c.primitive, seed, out.error.c_str());
        return 1;
      }
      std::printf("%s %d %s\n", c.primitive, seed, text_of(out).c_str());
    }
    return 0;
  }
  std::printf("error: no primitive %s\n", primitive.c_str());
  return 2;
}

// Each primitive in a process of its own: a fault on the card takes the process's context with it. What fails gets no
// vector, and is reported as unproven from then on.
int record(const char* program, const char* path) {
  std::ofstream file(path);
  file << "# " << machine() << "\n";
  int vectors = 0, failures = 0;
  for (const Case& c : cases()) {
    const std::string command = std::string("'") + program + "' vectors " + c.primitive + " 2>&1";
    FILE* child = popen(command.c_str(), "r");
    if (!child) return 2;
    std::string text, error;
    int lines = 0;
    for (char buffer[1 << 14]; std::fgets(buffer, sizeof buffer, child);) {
      const bool whole =
          std::strncmp(buffer, c.primitive, std::strlen(c.primitive)) == 0 || (!text.empty() && text.back() != '\n');
      (whole ? text : error) += buffer;
      lines += text.ends_with('\n') && whole;
    }
    if (pclose(child) == 0) {
      file << text;
      vectors += lines;
    } else {
      std::printf("failed %s: %s", c.primitive, error.c_str());
      ++failures;
    }
  }
  std::printf("%d vectors recorded on %s, %d primitives failed\n", vectors, machine().c_str(), failures);
  return failures != 0;
}

int check(const char* path, int stride) {
  std::ifstream file(path);
  std::map<std::string, std::map<int, std::string>> stored;
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    std::string primitive, text;
    int seed = 0;
    fields >> primitive >> seed >> text;
    stored[primitive][seed] = text;
  }
  int checked = 0, wrong = 0;
  for (const Case& c : cases()) {
    const auto vectors = stored.find(c.primitive);
    if (vectors == stored.end()) {
      std::printf("unproven %s\n", c.primitive);
      continue;
    }
    for (const auto& [seed, text] : vectors->second) {
      if (seed % stride) continue;
#ifdef WARPSMITH_SIM
      sim::options().seed = static_cast<uint64_t>(seed / stride % 6);  // late, early and random asynchronous work
#endif
      const Output out = run(c, seed);
      ++checked;
      if (out.error.empty() && matches(c, out, text)) continue;
      std::printf("differs %s seed %d %s\n", c.primitive, seed, out.error.c_str());
      ++wrong;
    }
  }
  std::printf("%d vectors checked on %s, %d differ\n", checked, machine().c_str(), wrong);
  return wrong != 0;
}

}  // namespace
}  // namespace warpsmith::conformance

int main(int argc, char** argv) {
  using namespace warpsmith::conformance;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "record" && argc == 3) return record(argv[0], argv[2]);
  if (mode == "vectors" && argc == 3) return vectors_of(argv[2]);
  if (mode == "check" && argc >= 3) return check(argv[2], argc > 3 ? std::atoi(argv[3]) : 1);
  if (mode == "list") {
    for (const Case& c : cases()) std::printf("%s %d\n", c.primitive, c.seeds);
    return 0;
  }
  std::printf("usage: %s record FILE | check FILE [stride] | list\n", argv[0]);
  return 2;
}
