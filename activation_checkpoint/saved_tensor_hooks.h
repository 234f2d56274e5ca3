#pragma once
// Who keeps the tensors that autograd saves for backward: what torch.autograd.graph.saved_tensors_hooks is in Python,
// and libtorch leaves to its Python engine.
//
// How: libtorch asks its default engine for the hooks of each tensor that it saves. The first scope replaces that
// engine by one that is the same but for this answer.
//
// Thread safety: a scope holds for the calling thread.

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace tessera {

/// Makes the hooks of one saved tensor: call_pack_hook is called at once with the tensor, call_unpack_hook when
/// backward needs it; the hooks are destroyed when the graph lets the tensor go.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make() = 0;
};

/// All tensors that the calling thread saves in the scope go to `hooks`, which must outlive it; null: kept by autograd
/// as usual. The innermost scope counts. Throws StateError if another library has replaced libtorch's engine (PyTorch's
/// Python does), whose own hooks would be lost.
class SavedTensorHooksScope {
 public:
  explicit SavedTensorHooksScope(SavedTensorHooks* hooks);
  ~SavedTensorHooksScope();
  SavedTensorHooksScope(const SavedTensorHooksScope&) = delete;
  SavedTensorHooksScope& operator=(const SavedTensorHooksScope&) = delete;

  /// Whether hooks take what the calling thread saves.
  static bool is_open();

 private:
  SavedTensorHooks* previous_;
};

}  // namespace tessera
