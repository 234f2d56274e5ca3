#pragma once
// The tower of small_models.h under tensor parallelism, laid out by hand.

#include "device_mesh/device_mesh.h"
#include "tests/fully_shard/models/small_models.h"

namespace tessera::testing {

/// up is cut by its rows, down by its columns, and the activations between are DTensors; inputs and outputs are plain
/// and equal along `tp`. Communicates once forward (an all-reduce after down) and once backward (before up).
void parallelize_block(Block& block, const DeviceMesh& tp);

/// The blocks so, `out` by its rows, and `norm` as copies, each rank of `tp` working on its rows of the batch, so that
/// its gradients are terms of a sum. `in` stays plain.
void parallelize_tower(Tower& tower, const DeviceMesh& tp);

/// Two blocks, of which the second runs only if asked to, and a plain layer.
struct BranchImpl : torch::nn::Module {
  BranchImpl();
  at::Tensor forward(at::Tensor x, bool both);

  Block always{nullptr}, sometimes{nullptr};
  tessera::nn::Linear plain{nullptr};
};
TESSERA_MODULE(Branch);

void parallelize_branch(Branch& branch, const DeviceMesh& tp);

/// Filled, the same on all ranks.
Branch make_branch();
Block make_block();

/// Of a batch that depends on its number only.
at::Tensor loss_of(Branch& branch, int64_t batch, bool both = true);

}  // namespace tessera::testing
