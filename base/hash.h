#pragma once
// 64-bit hashes for caches within one process: cheap, without allocation, not stable across versions.

#include <cstdint>
#include <cstring>

namespace tessera {

/// Mixes `value` into `seed` with MurmurHash3's finalizer.
inline uint64_t hash_combine(uint64_t seed, uint64_t value) {
  uint64_t x = seed ^ (value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2));
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  return x;
}

inline uint64_t hash_double(double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace tessera
