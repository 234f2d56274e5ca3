#pragma once
// Which sample comes when, and which tokens it has: pure functions on integers.
//
//   sources of weights 3 and 1: samples 0 to 7 are 0/0 0/1 0/2 1/0 0/3 0/4 0/5 1/1 (source / its sample)
//   documents of 5, 2 and 6 tokens, packed into samples of 8: [0, 5) [5, 7) [7, 8) and [8, 13)
//
// Thread safety: pure.

#include <cstdint>
#include <vector>

namespace tessera::data {

/// Returns where `index` goes in a permutation of 0, ..., size - 1, one for each key.
int64_t permuted(int64_t index, int64_t size, uint64_t key);
/// Returns a key for permuted().
uint64_t permutation_key(uint64_t seed, int64_t source, int64_t epoch);

struct Turn {
  int64_t source = 0;
  int64_t index = 0;  // how many samples of the source come before
};

/// Returns whose turn sample `index` is. After any number of samples, each source has had its weight's part of them,
/// give or take a few: with two sources less than one, with n about log(n).
Turn turn_of(int64_t index, const std::vector<double>& weights);

/// Tokens begin, ..., end - 1 of all documents.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const TokenRange&) const = default;
};

/// Returns the number of samples of `length` tokens that all documents make, one after the other. `starts` are as in
/// DocumentParts.
int64_t num_packed_samples(const std::vector<int64_t>& starts, int64_t length);
/// Returns a sample's part of each document that it has a part of.
std::vector<TokenRange> packed_sample(const std::vector<int64_t>& starts, int64_t length, int64_t sample);

}  // namespace tessera::data
