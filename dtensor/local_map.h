#pragma once
// Runs a function of local tensors on DTensors: for ops that this library has no rule for, and for own kernels.
//
//   auto y = local_map([](const std::vector<at::Tensor>& x) { return std::vector{my_kernel(x[0], x[1])}; }, {a, b},
//                      {.out_placements = {{Shard(0)}}, .in_placements = {{{Shard(0)}, {Replicate()}}}})[0];
//
// Differentiable through the function. Shards may be uneven: global sizes of the results are found by exchanging the
// local ones, unless `out_shapes` gives them.
// After torch/distributed/tensor/experimental/_func_map.py.

#include <functional>
#include <optional>
#include <vector>

#include "dtensor/dtensor.h"

namespace tessera {

struct LocalMapOptions {
  /// Placements of each result.
  std::vector<Placements> out_placements;
  /// What each DTensor among the inputs must have; one entry an input, nullopt for any. Default: any.
  std::vector<std::optional<Placements>> in_placements = {};
  /// Redistribute inputs that lie otherwise than in_placements says, rather than throw.
  bool redistribute_inputs = false;
  /// Placements that the gradient of each input has, one entry an input. Default: as to_local.
  std::vector<std::optional<Placements>> in_grad_placements = {};
  /// Global sizes of each result. Default: found by a small exchange between the ranks. With them nothing is exchanged,
  /// and a result that does not fit them is an error on its own rank alone.
  std::vector<std::vector<int64_t>> out_shapes = {};
};

/// `function` on the local tensors of `inputs` (plain ones are passed as they are); its results as DTensors on the
/// inputs' mesh. It may write to a local tensor in place where to_local() says so. All ranks must call it. Throws
/// ValueError, on every rank, if no input is a DTensor, meshes differ, an input lies otherwise than required, numbers
/// do not fit, a result is undefined, or the local results do not form tensors cut as torch.chunk cuts them.
std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs, const LocalMapOptions& options);

/// The global sizes of a tensor of which every rank holds `local` under `placements`: sums of local sizes along the
/// axes that shard. Collective; the same on every rank if the local sizes fit together.
std::vector<int64_t> gather_shape(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements);

}  // namespace tessera
