#pragma once
// Refuses changes in place across the boundary of a unit.
//
// The aliases behind a unit's nodes share memory with the tensors that they stand for, but no history: a change in
// place on one side would be missing in the gradient of the other. So forward must not change an input whose caller
// still has the original, and the caller must not change outputs that share memory.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "nn/hooks/hook_point.h"

namespace tessera {

/// An input of a unit, and the alias that took its place: the input itself where it needed no node.
class AliasedTensor {
 public:
  AliasedTensor(at::Tensor original, at::Tensor alias);

  const at::Tensor& original() const { return original_; }
  const at::Tensor& alias() const { return alias_; }
  /// Returns whether the caller may still use the original.
  bool has_caller() const;
  /// Returns whether an op in place gave the alias a history that the original lacks.
  bool has_own_history() const;

 private:
  at::Tensor original_, alias_;
  const void* node_;  // that made the alias, which keeps it alive while it is unchanged
};

/// Name of a unit in messages. Refers to its texts.
struct UnitTitle {
  const std::string& api;  // the function that made it
  const std::string& name;
  const std::string& label;

  std::string to_string() const;
};

/// Throws StateError if forward changed an alias in place whose original the caller still has.
void check_inputs_unchanged(const std::vector<AliasedTensor>& inputs, const UnitTitle& unit);

/// Returns the outputs with a gradient that share memory with another one, or with an input that its caller still has.
std::vector<at::Tensor*> find_shared_outputs(TensorRefs outputs, const std::vector<AliasedTensor>& inputs);

}  // namespace tessera
