#pragma once
// Recomputes the tensors that one checkpointed forward saves, instead of keeping them.
//
// In forward, each tensor that autograd saves becomes a slot: a number and the region. In backward, the first slot
// needed runs forward again with the same inputs, random numbers and scopes, and the tensors that autograd saves in it
// fill the slots in order; that second graph is dropped. A slot frees its tensor when autograd releases it. Tensor
// versions are checked as autograd does. The inputs of a nested region are saved through autograd, in the outer
// region's slots.
// Thread safety: several autograd threads may request slots. Source: torch.utils.checkpoint (use_reentrant=False).

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
  /// Runs `forward` once as a region. `again` is the same call, for backward; `place` names it in errors.
  static void run(const std::function<void()>& forward, std::unique_ptr<RecomputableCall> again,
                  const CheckpointOptions& options, std::string place);

 private:
  /// Metadata of a saved tensor.
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
    at::Tensor tensor = {};  // defined once the second forward has run
    int64_t version = 0;     // of `tensor` when it was saved
    bool is_needed = true;
  };
  class SlotHooks;
  class SlotMaker;
  class FillHooks;
  class FillMaker;

  CheckpointRegion(std::unique_ptr<RecomputableCall> again, const CheckpointOptions& options, std::string place);

  size_t add_slot(const at::Tensor& tensor);
  at::Tensor unpack(size_t slot);
  void drop(size_t slot) noexcept;
  SavedOps* ops() { return options_.ops_to_save.empty() ? nullptr : &ops_; }
  void recompute();
  void fill_next(const at::Tensor& tensor);
  void check_recomputed(const Slot& slot, const at::Tensor& tensor) const;
  void check_unchanged(const at::Tensor& tensor, int64_t version) const;
  void check_filled() const;
  void clear();

  std::unique_ptr<RecomputableCall> again_;
  const CheckpointOptions options_;
  const std::string place_;
  ForwardContext context_;
  SavedOps ops_;
  std::vector<torch::autograd::SavedVariable> inputs_;  // in the order in which `again_` visits them
  std::vector<Slot> slots_;
  bool is_whole_ = false;  // the first forward has ended, so there are no more slots
  size_t filled_ = 0;      // by the latest second forward
  int64_t backward_ = -1;  // for which the slots are filled
  std::recursive_mutex mutex_;
};

}  // namespace tessera
