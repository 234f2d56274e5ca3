#pragma once
// One checkpointed forward: what it would have saved for backward is not kept, but computed again.
//
//   forward    each tensor that autograd saves becomes a slot: a number and the region, nothing more
//   backward   the first slot that is asked for runs the forward again, with the inputs, random numbers and scopes
//              of the first time; the tensors that autograd saves in it fill the slots, in the same order
//   then       each slot frees its tensor when autograd lets go of it
//
// Versions of tensors are compared as autograd compares those that it keeps itself: one that is changed in place after
// it was saved, in the second forward or between the two, is an error and no wrong gradient.
//
// The backward that runs is that of the first forward: gradients, hooks and fully_shard see one graph; the graph of the
// second forward is dropped as soon as it is done. Regions nest: the inputs of an inner one are saved through autograd,
// so the outer region's slots hold them.
//
// The idea is that of torch.utils.checkpoint with use_reentrant=False.
//
// Thread safety: slots may be asked for by several threads of autograd.

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "activation_checkpoint/checkpoint_options.h"
#include "activation_checkpoint/forward_context.h"
#include "activation_checkpoint/saved_tensor_hooks.h"
#include "dtensor/spec/dtensor_spec.h"
#include "nn/hooks/recomputable_call.h"

namespace tessera {

class CheckpointRegion : public std::enable_shared_from_this<CheckpointRegion> {
 public:
  /// Calls `forward` once, as one region. `again` is the same call, for backward; `place` names it in errors.
  static void run(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again,
                  const CheckpointOptions& options, std::string place);

 private:
  /// What is known of a saved tensor.
  struct SavedMeta {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    SpecPtr spec;  // null for a plain tensor

    explicit SavedMeta(const at::Tensor& tensor);
    bool operator==(const SavedMeta& other) const;
    std::string to_string() const;
  };
  struct Slot {
    SavedMeta meta;
    int64_t first_version;   // of the tensor that the first forward saved
    at::Tensor tensor = {};  // defined from the second forward on
    int64_t version = 0;     // of `tensor` when it was saved
    bool is_needed = true;
  };
  class SlotHooks;
  class SlotMaker;
  class FillHooks;
  class FillMaker;

  CheckpointRegion(std::unique_ptr<RecomputableCall> again, const CheckpointOptions& options, std::string place);

  size_t add_slot(const at::Tensor& tensor);
  at::Tensor tensor_of(size_t slot);
  void drop(size_t slot) noexcept;
  SavedOps* ops() { return options_.ops_to_save.empty() ? nullptr : &ops_; }
  void recompute();
  void fill_next(const at::Tensor& tensor);
  void check_alike(const Slot& slot, const at::Tensor& tensor) const;
  void check_unchanged(const at::Tensor& tensor, int64_t version) const;
  void check_filled() const;
  void clear();

  std::unique_ptr<RecomputableCall> again_;
  const CheckpointOptions options_;
  const std::string place_;
  ForwardContext context_;
  SavedOps ops_;
  std::vector<torch::autograd::SavedVariable> inputs_;  // in the order in which `again_` shows them
  std::vector<Slot> slots_;
  bool is_whole_ = false;  // the first forward is over: there will be no more slots
  size_t filled_ = 0;      // by the second forward that runs or ran last
  int64_t backward_ = -1;  // for which the slots are filled
  std::recursive_mutex mutex_;
};

}  // namespace tessera
