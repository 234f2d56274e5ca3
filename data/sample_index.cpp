#include "data/sample_index.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace tessera::data {

namespace {

/// Mixes 64 bits like SplitMix64.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

constexpr int kRounds = 64;
constexpr uint64_t kOne = uint64_t{1} << 32;

/// Returns how many of `count` turns go to a source with a share of `share` / 2^32, rounded up.
int64_t turns(int64_t count, uint64_t share) {
  const auto whole = static_cast<uint64_t>(count);
  return static_cast<int64_t>((whole >> 32) * share + (((whole & (kOne - 1)) * share + kOne - 1) >> 32));
}

}  // namespace

// "An Enciphering Scheme Based on a Card Shuffle" (Hoang, Morris, Rogaway 2012): each round pairs all indices, and
// swaps the two of a pair or not.
int64_t permuted(int64_t index, int64_t size, uint64_t key) {
  const auto n = static_cast<uint64_t>(size);
  auto x = static_cast<uint64_t>(index);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t round_key = mixed(key + static_cast<uint64_t>(round));
    const uint64_t partner = (round_key % n + n - x) % n;
    if (mixed(round_key ^ mixed(std::max(x, partner))) >> 63 != 0) {
      x = partner;
    }
  }
  return static_cast<int64_t>(x);
}

uint64_t permutation_key(uint64_t seed, int64_t source, int64_t epoch) {
  return mixed(mixed(mixed(seed) ^ static_cast<uint64_t>(source)) ^ static_cast<uint64_t>(epoch));
}

// The first source gets its share of the turns, evenly spaced; the others divide the rest in the same way.
Turn turn_of(int64_t index, const std::vector<double>& weights) {
  std::vector<double> left(weights.size() + 1, 0);  // weight of a source and those after it
  for (size_t i = weights.size(); i-- > 0;) {
    left[i] = left[i + 1] + weights[i];
  }
  for (size_t i = 0; i + 1 < weights.size(); ++i) {
    const auto share = static_cast<uint64_t>(std::llround(weights[i] / left[i] * static_cast<double>(kOne)));
    const int64_t before = turns(index, share);
    if (turns(index + 1, share) > before) {
      return {static_cast<int64_t>(i), before};
    }
    index -= before;
  }
  return {static_cast<int64_t>(weights.size()) - 1, index};
}

int64_t num_packed_samples(const std::vector<int64_t>& starts, int64_t length) {
  return starts.back() / length + (starts.back() % length > 0 ? 1 : 0);
}

std::vector<TokenRange> packed_sample(const std::vector<int64_t>& starts, int64_t length, int64_t sample) {
  const int64_t begin = sample * length, end = std::min(begin + length, starts.back());
  std::vector<TokenRange> ranges;
  auto next = std::upper_bound(starts.begin(), starts.end(), begin);  // end of the first document
  for (int64_t at = begin; at < end; ++next) {
    ranges.push_back({at, std::min(*next, end)});
    at = ranges.back().end;
  }
  return ranges;
}

}  // namespace tessera::data
