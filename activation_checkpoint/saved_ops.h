#pragma once
// Selective checkpointing: keeps the results of some ops, such as matrix products, instead of recomputing them.
//
//   checkpoint({.ops_to_save = OpList({"aten::mm", "aten::addmm"})}, block, x);
//
// A thread-local dispatch key below autograd sees every op of the region. The first forward saves results, and the
// second returns them instead of running the op. Source: torch.utils.checkpoint.create_selective_checkpoint_contexts.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace tessera {

/// Set of ops by name, with all overloads that return new tensors. Cheap to copy. Thread safety: immutable.
class OpList {
 public:
  OpList() = default;
  /// Throws KeyError for an unknown name. Throws ValueError for an op that decomposes into others (instead of
  /// aten::linear, name aten::addmm and aten::mm), writes or returns its arguments, or draws random numbers. A call of
  /// an op with a dropout_p above 0 runs again.
  OpList(const std::vector<std::string>& names);  // NOLINT: a list of names is one

  bool empty() const { return !ops_; }
  bool contains(const c10::OperatorName& op) const { return ops_ && ops_->contains(op); }

 private:
  std::shared_ptr<const std::unordered_set<c10::OperatorName>> ops_;
};

/// Saved results of a region's ops. Thread safety: for the thread that runs a forward of the region.
class SavedOps {
 public:
  explicit SavedOps(OpList list) : list_(std::move(list)) {}

  bool covers(const c10::OperatorHandle& op) const { return list_.contains(op.operator_name()); }
  /// Runs the op and saves its results.
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  void rewind() { next_ = 0; }  // starts a second forward
  /// Returns the saved results of the corresponding call instead of running the op. Throws StateError if that call was
  /// another op, or if its result has been changed in place.
  void replay(const c10::OperatorHandle& op, torch::jit::Stack* stack);

 private:
  struct Result {
    c10::OperatorName op;
    std::vector<c10::IValue> values;
    std::vector<int64_t> versions;  // of the tensors in `values`
  };

  OpList list_;
  std::vector<Result> results_;
  size_t next_ = 0;
};

/// Routes the calling thread's ops through `ops`; null means none. Scopes nest, and the innermost applies.
class SavedOpsScope {
 public:
  enum class Mode { Save, Replay };

  SavedOpsScope(SavedOps* ops, Mode mode);
  ~SavedOpsScope();
  SavedOpsScope(const SavedOpsScope&) = delete;
  SavedOpsScope& operator=(const SavedOpsScope&) = delete;

 private:
  SavedOps* previous_ops_;
  Mode previous_mode_;
  bool was_included_;
};

}  // namespace tessera
