#pragma once
// What a unit gives its caller, so that a later change in place is seen wherever autograd sees it in one process.
//
// The aliases that a border puts in front of its nodes (autograd_boundary.h) share memory with what they stand for, but
// no history. So what shares memory is not aliased one by one.
//
// A unit's input is a tensor of the caller's, and stays that one where forward changes it in place or returns it or a
// view of it. Such an input is one more output of the unit, the caller's tensor gets the history of that, and is what
// the unit returns, or views of it are:
//
//   y = block(h); loss(y + h)          block begins with h.relu_()
//   h's old history ◀─ input node ◀─ relu ◀─┬─ ... ◀─ output node ◀─ y
//                                           └─────── output node ◀─ h
//
// Outputs that are views of one tensor, or that tensor and views, become views of one alias, that of the tensor.
//
// Where neither can be (memory that is shared in another way, views that own functions or several views at once made,
// views with tensor hooks), a change in place between forward and backward makes that backward an error. Autograd
// itself refuses changes of most of these.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "fully_shard/autograd/aliased_tensor.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

/// What messages call a unit. Refers to its texts.
struct UnitTitle {
  const std::string& api;  // the function that made it
  const std::string& name;
  const std::string& label;

  std::string to_string() const;
};

class UnitOutputs {
 public:
  /// Of a call with these inputs, which live until connect(), as does the title. Throws StateError where
  /// forward changed an input in place whose history the caller's tensor cannot have, or which another input shares
  /// memory with.
  UnitOutputs(TensorRefs outputs, std::vector<AliasedTensor>& inputs, UnitTitle unit);

  /// Whether they share no memory with each other or with inputs, and none of those changed.
  bool are_plain() const { return bases_.empty() && unchangeable_.empty(); }
  /// The tensors to put behind nodes, each to be replaced by its alias there.
  std::vector<at::Tensor*> behind_nodes();
  /// Once that is done: inputs get their new history, and outputs become what the caller is to have.
  void connect();

 private:
  /// An output that is `base` or a view of it.
  struct View {
    at::Tensor* output;
    size_t base;
  };
  struct Base {
    at::Tensor tensor;               // as it was in forward
    at::Tensor alias = tensor;       // in front of the node
    AliasedTensor* input = nullptr;  // whose alias it is
  };

  /// With others than the input `own`, which is to have the tensor's history.
  bool shares_memory(const at::Tensor& tensor, const std::vector<AliasedTensor>& inputs,
                     const AliasedTensor* own) const;

  UnitTitle unit_;
  std::vector<at::Tensor*> single_;  // outputs with a node of their own
  std::vector<View> views_;
  std::vector<Base> bases_;
  std::vector<const at::Tensor*> unchangeable_;  // of those above, as they are behind nodes
};

}  // namespace tessera
