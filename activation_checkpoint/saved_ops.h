#pragma once
// Selective checkpointing: results of some ops of a region are kept, so that the second forward need not compute them
// again. Worth it for those that cost much time and little memory, products above all:
//
//   checkpoint({.ops_to_save = OpList({"aten::mm", "aten::addmm"})}, block, x);
//
// How: between autograd and the ops, a dispatch key of the calling thread sees every op of the region. In the first
// forward it keeps results, in the second it hands them out in place of running the op; autograd, above it, sees no
// difference. After torch.utils.checkpoint.create_selective_checkpoint_contexts.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/operator_name.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

namespace tessera {

/// Ops by name, all their overloads that return new tensors. Cheap to copy. Thread safety: immutable.
class OpList {
 public:
  OpList() = default;
  /// Throws KeyError for a name that libtorch does not know; ValueError for an op that consists of others
  /// (aten::linear: name aten::addmm and aten::mm, which it runs), that writes or returns its arguments, or that draws
  /// random numbers (the second forward draws them again, to keep later draws the same).
  OpList(const std::vector<std::string>& names);  // NOLINT: a list of names is one

  bool empty() const { return !ops_; }
  bool contains(const c10::OperatorName& op) const { return ops_ && ops_->contains(op); }

 private:
  std::shared_ptr<const std::unordered_set<c10::OperatorName>> ops_;
};

/// What the ops of one region gave. Thread safety: for the thread that runs a forward of the region.
class SavedOps {
 public:
  explicit SavedOps(OpList list) : list_(std::move(list)) {}

  bool covers(const c10::OperatorHandle& op) const { return list_.contains(op.operator_name()); }
  /// Runs the op and keeps what it returns.
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  /// Starts a second forward.
  void rewind() { next_ = 0; }
  /// In place of running the op: returns what the call of the same order returned. Throws StateError if that was
  /// another op, or its result was changed in place since.
  void replay(const c10::OperatorHandle& op, torch::jit::Stack* stack);

 private:
  struct Result {
    c10::OperatorName op;
    std::vector<c10::IValue> values;
    std::vector<int64_t> versions;  // of the tensors among them
  };

  OpList list_;
  std::vector<Result> results_;
  size_t next_ = 0;
};

/// Lets the calling thread's ops go through `ops` until its end; null: through none. Scopes nest, the innermost counts.
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
