#pragma once
// An optimizer's state that one rank has, for all ranks.

#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

#include "comm/process_group.h"
#include "device_mesh/device_mesh.h"
#include "fsdp1/fsdp_optim_state.h"

namespace tessera {

/// The first rank of `group`; where that is null, of those that have the mesh of the model's units, and without units
/// of the default group, in which a rank without peers is its own first.
class FirstRank {
 public:
  FirstRank(torch::nn::Module& model, const ProcessGroupPtr* group);

  bool is_this_one() const { return is_this_one_; }
  /// The dict that `own` gives on the first rank, where alone it is called. On the others tensors with dims are on the
  /// meta device: value_of() has their values. Throws what `own` throws there, and elsewhere a ValueError with its
  /// text. Collective.
  OptimStateDict outline(const std::function<OptimStateDict()>& own) const;
  /// The values behind an entry of outline(), on every rank. Collective.
  at::Tensor value_of(const at::Tensor& entry) const;

 private:
  std::string text_of_first(const std::string& own) const;
  void broadcast_from_first(const at::Tensor& tensor) const;

  const ProcessGroupPtr* group_;
  std::optional<DeviceMesh> mesh_;  // with all axes; where there is a group, unused
  size_t place_ = 0;                // of the first rank in mesh_->ranks()
  at::Device device_ = at::kCPU;
  bool is_this_one_ = true;
};

}  // namespace tessera
