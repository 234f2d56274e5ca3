#pragma once
// Hooks for tensors that autograd saves, like torch.autograd.graph.saved_tensors_hooks in Python.
// libtorch asks its default engine for such hooks; the first scope replaces that engine by one that provides them.
// Thread safety: a scope affects the calling thread.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera {

/// Makes the hooks of one saved tensor. They are destroyed when the graph releases it; call_pack_hook runs at once, and
/// call_unpack_hook when backward needs the tensor.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

/// Passes all tensors that the calling thread saves to `hooks`, which must outlive the scope; null disables hooks. The
/// innermost scope applies. Throws StateError if the engine was already replaced, as by PyTorch's Python module.
class SavedTensorHooksScope {
 public:
  explicit SavedTensorHooksScope(SavedTensorHooks* hooks);
  ~SavedTensorHooksScope();
  SavedTensorHooksScope(const SavedTensorHooksScope&) = delete;
  SavedTensorHooksScope& operator=(const SavedTensorHooksScope&) = delete;

  /// Returns whether hooks are active in the calling thread.
  static bool is_open();

 private:
  SavedTensorHooks* previous_;
};

}  // namespace tessera
