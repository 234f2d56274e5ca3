#pragma once
// Rejects in-place changes across the boundary of a unit.
//
// The aliases behind a unit's nodes share memory with the original tensors, but not their history, so an in-place
// change on one side would be missing in the other's gradient. Therefore forward must not change an input if the caller
// still has the original, and the caller must not change outputs that share memory.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "nn/hooks/hook_point.h"

namespace tessera {

/// Input of a unit and the alias that replaced it, or the input itself if it needed no node.
class AliasedTensor {
 public:
  AliasedTensor(at::Tensor original, at::Tensor alias);

  const at::Tensor& original() const { return original_; }
  const at::Tensor& alias() const { return alias_; }
  /// Returns whether the caller may still use the original.
  bool has_caller() const;
  /// Returns whether an in-place op gave the alias a history that the original lacks.
  bool has_own_history() const;

 private:
  at::Tensor original_, alias_;
  const void* node_;  // node that made the alias, which keeps it alive while unchanged
};

/// Name of a unit in messages. Holds references to the strings.
struct UnitTitle {
  const std::string& api;  // function that made the unit
  const std::string& name;
  const std::string& label;

  std::string to_string() const;
};

/// Throws StateError if forward changed an alias in place and the caller still has the original.
void check_inputs_unchanged(const std::vector<AliasedTensor>& inputs, const UnitTitle& unit);

/// Returns the outputs with a gradient that share memory with another output, or with an input that the caller still
/// has.
std::vector<at::Tensor*> find_shared_outputs(TensorRefs outputs, const std::vector<AliasedTensor>& inputs);

}  // namespace tessera
