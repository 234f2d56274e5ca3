#pragma once
// Cache of the keys and values of earlier tokens, so that a decoder computes only new ones.
//
//   const c10::NoGradGuard no_grad;
//   models::KeyValueCache cache(/*capacity=*/100);
//   auto logits = model->forward(prompt, {.cache = &cache});                       // [batch, length] of ids
//   logits = model->forward(next, {.cache = &cache});                              // [batch, 1]: attends to the prompt
//
// Layers with a sliding window also keep all tokens, and mask them. Thread safety: one forward at a time.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::models {

class KeyValueCache {
 public:
  /// Makes an empty cache for `capacity` tokens per row. The first forward allocates this rank's memory.
  explicit KeyValueCache(int64_t capacity) : capacity_(capacity) {}

  int64_t capacity() const { return capacity_; }
  /// Returns the number of tokens in each row, including padding.
  int64_t length() const { return length_; }

 private:
  friend struct AttentionImpl;
  friend struct DecoderImpl;

  struct Layer {
    at::Tensor keys;  // [batch, heads of this rank, capacity, head_dim]
    at::Tensor values;
  };

  /// Appends a layer's keys and values [batch, heads, new tokens, head_dim], DTensors or plain. Replaces them by those
  /// of all tokens.
  void append(size_t layer, at::Tensor& keys, at::Tensor& values);

  int64_t capacity_;
  int64_t length_ = 0;
  at::Tensor starts_;  // [batch, 1], start of each row's last segment; undefined: 0
  std::vector<Layer> layers_;
};

}  // namespace tessera::models
