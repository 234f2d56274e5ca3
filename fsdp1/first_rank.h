#pragma once
// Shares the optimizer state of one rank with all ranks.

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "fsdp1/fsdp_optim_state.h"

namespace tessera {

/// The first rank of `group` or, if null, of the units' mesh or, without units, of the default group.
class FirstRank {
 public:
  FirstRank(torch::nn::Module& model, const ProcessGroupPtr* group);

  bool is_this_one() const { return is_this_one_; }
  /// Returns the dict of `own`, called on the first rank only. Elsewhere its tensors with dims are on the meta device.
  /// If `own` throws, rethrows the error there, and throws ValueError with its text elsewhere. All ranks must call it.
  OptimStateDict outline(const std::function<OptimStateDict()>& own) const;
  /// Returns the values of an outline() entry on every rank. All ranks must call it.
  at::Tensor value(const at::Tensor& entry) const;

 private:
  std::string text_of_first(const std::string& own) const;
  void broadcast_from_first(const at::Tensor& tensor) const;

  const ProcessGroupPtr* group_;
  std::optional<DeviceMesh> mesh_;  // with all axes; unused if there is a group
  size_t place_ = 0;                // of the first rank in mesh_->ranks()
  at::Device device_ = at::kCPU;
  bool is_this_one_ = true;
};

}  // namespace tessera
