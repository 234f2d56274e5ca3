#pragma once
// Applies a function of local tensors to DTensors, for ops without a sharding rule and custom kernels.
// docs/semantics.md has an example. Source: torch/distributed/tensor/experimental/_func_map.py.

#include <functional>
#include <optional>
#include <vector>

#include "dtensor/dtensor.h"

namespace tessera {

struct LocalMapOptions {
  std::vector<Placements> out_placements;                          // one entry per result
  std::vector<std::optional<Placements>> in_placements = {};       // one per input; std::nullopt: any
  bool redistribute_inputs = false;                                // instead of throwing
  std::vector<std::optional<Placements>> in_grad_placements = {};  // default: see to_local
  std::vector<std::vector<int64_t>> out_shapes = {};               // global sizes; default: exchanged
};

/// Runs `function` on local tensors and returns DTensors. Supports autograd. All ranks must call it. Throws ValueError,
/// on every rank unless `out_shapes` is given, if inputs, meshes or results do not fit the options.
std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs, const LocalMapOptions& options);

/// Returns global sizes by adding up local sizes along the sharded axes. All ranks must call it.
std::vector<int64_t> gather_shape(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera
