#pragma once
// A text file as training data. It is split into blocks of 16 samples' length; every tenth block is for validation, so
// that training and validation see the same kinds of text.
//
//   ByteData data("book.txt", /*context=*/128, /*seed=*/1);
//   Batch batch = data.train_batch(step, {.first = 8, .count = 8});   // the second half of a global batch of 16
//
// The bytes of sample i in step s depend only on the seed, s and i, so any number of ranks, each with its own range of
// samples, sees the same global batch.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::examples {

/// Training pairs: targets[b][t] is the byte after tokens[b][t]; both [samples, context], int64.
struct Batch {
  at::Tensor tokens;
  at::Tensor targets;
};

/// Samples first, first + 1, ..., first + count - 1 of a global batch.
struct SampleRange {
  int64_t first = 0;
  int64_t count = 0;
};

/// Thread safety: any number of threads may read.
class ByteData {
 public:
  /// Reads the whole file. Throws ValueError, naming it, if it cannot be read or has fewer than ten blocks.
  ByteData(const std::string& path, int64_t context, uint64_t seed);

  Batch train_batch(int64_t step, SampleRange range, int64_t global_batch) const;

  /// Returns samples of a fixed set of `total` ones, spread evenly over the validation part.
  Batch validation_batch(SampleRange range, int64_t total) const;

  int64_t train_bytes() const { return train_.numel(); }
  int64_t validation_bytes() const { return validation_.numel(); }
  /// Returns an identity of the text that does not depend on its path: "(8893 bytes, XXH3 0123456789abcdef)".
  std::string fingerprint() const;

 private:
  Batch gather(const at::Tensor& text, const std::vector<int64_t>& offsets) const;

  int64_t context_;
  uint64_t seed_;
  uint64_t hash_ = 0;
  at::Tensor train_;
  at::Tensor validation_;
};

}  // namespace tessera::examples
