#pragma once
// Random choices for property tests that, unlike std's distributions, are equal on all platforms for a seed.

#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

namespace tessera {

class Draws {
 public:
  explicit Draws(uint64_t seed) : engine_(seed) {}
  /// Returns a number in [0, limit).
  int64_t below(int64_t limit) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(limit)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class T>
  const T& of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

/// Returns the number in an environment variable, or `otherwise` if it is not set.
inline uint64_t number_from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace tessera
