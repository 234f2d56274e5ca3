#pragma once
// Maps sample numbers to sources and tokens: pure functions on integers.
//
//   sources with weights 3 and 1: samples 0 to 7 are 0/0 0/1 0/2 1/0 0/3 0/4 0/5 1/1 (source / sample of the source)
//   documents of 5, 2 and 6 tokens, packed into samples of 8: [0, 5) [5, 7) [7, 8) and [8, 13)
//
// Thread safety: pure functions.

#include <cstdint>
#include <vector>

namespace tessera::data {

/// Returns the image of `index` in the permutation of 0, ..., size - 1 that `key` selects.
int64_t permuted(int64_t index, int64_t size, uint64_t key);
/// Returns a permutation key for permuted().
uint64_t permutation_key(uint64_t seed, int64_t source, int64_t epoch);

struct Turn {
  int64_t source = 0;
  int64_t index = 0;  // number of earlier samples of the source
};

/// Returns the source of sample `index`. After any number of samples, each source's count is close to its weight's
/// share: within one for two sources, about log(n) for n.
Turn turn_of(int64_t index, const std::vector<double>& weights);

/// Tokens [begin, end) of the concatenated documents.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const TokenRange&) const = default;
};

/// Returns the number of samples of `length` tokens in the concatenated documents. `starts` is DocumentParts::starts.
int64_t num_packed_samples(const std::vector<int64_t>& starts, int64_t length);
/// Returns the token range of each document that overlaps the sample.
std::vector<TokenRange> packed_sample(const std::vector<int64_t>& starts, int64_t length, int64_t sample);

}  // namespace tessera::data
