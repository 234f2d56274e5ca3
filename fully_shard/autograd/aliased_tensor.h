#pragma once
// What takes the place of a unit's input.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// An input of a unit, and the alias that took its place: the input itself where it needed no gradient.
class AliasedTensor {
 public:
  /// `alias` has its history already.
  AliasedTensor(at::Tensor original, at::Tensor alias);

  const at::Tensor& original() const { return original_; }
  const at::Tensor& alias() const { return alias_; }
  /// Whether an op changed the alias in place, and somebody may use the original, which has the old history. Not so for
  /// ops without grad mode, which change values alone in one process too.
  bool was_changed() const;
  /// Whether the alias's history can be the original's: not that of a leaf, a view (whose base changed too), or a
  /// tensor that retains its gradient.
  bool can_share_history() const;
  /// Makes it so. The original gets the gradient edge of `in_front`, which comes in the alias's place.
  void share_history_behind(at::Tensor in_front);

 private:
  bool is_original() const { return alias_.is_same(original_); }
  bool has_new_history() const;

  at::Tensor original_, alias_;
  const void* node_;  // the alias's, which that keeps alive while it is unchanged
  int64_t version_;
};

}  // namespace tessera
