#pragma once
// Distributes a GPT over a mesh of ranks: all steps in their required order.
//
//   Gpt model = make_model(config, seed, {.bf16 = true});
//   DeviceMesh mesh = make_mesh({.tp = 2}, at::kCPU);                   // of 8 ranks: {replicate: 1, dp: 4, tp: 2}
//   lay_out(model, mesh, {.bf16 = true});

#include <c10/core/DeviceType.h>

#include <cstdint>

#include "activation_checkpoint/checkpoint_options.h"
#include "device_mesh/device_mesh.h"
#include "examples/gpt_model.h"

namespace tessera::examples {

/// Number of ranks along each axis.
struct MeshShape {
  /// Data-parallel shards of the parameters. 0: all ranks that the other axes leave.
  int64_t dp = 0;
  /// Replicas of the data-parallel shards.
  int64_t replicate = 1;
  /// Tensor parallelism: shards of matrices; these ranks see the same data.
  int64_t tp = 1;
};

/// Returns `shape` with dp filled in. Throws ValueError, naming the options, if it does not match `world_size`.
MeshShape checked_shape(MeshShape shape, int64_t world_size);

/// Makes a mesh of all ranks with the axes replicate, dp and tp.
DeviceMesh make_mesh(const MeshShape& shape, c10::DeviceType device);

struct LayoutOptions {
  /// Device of the parameters; on CUDA the current one.
  c10::DeviceType device = c10::DeviceType::CPU;
  /// Gathers and computes in bfloat16.
  bool bf16 = false;
  /// Shards activations between matrices along the sequence over tp, rather than replicating them.
  bool sequence_parallel = false;
  /// Activations of each block that backward computes again.
  Recompute recompute = Recompute::None;
  /// Builds the model without memory, so that no rank ever holds more than its shards.
  bool meta_init = false;
};

/// Makes a model by `options`: with its values on its device, or without memory, which materialize() allocates after
/// lay_out.
Gpt make_model(const GptConfig& config, uint64_t seed, const LayoutOptions& options);

/// Allocates and initializes this rank's shards: bit by bit those of make_model without meta_init.
void materialize(Gpt& model, uint64_t seed, c10::DeviceType device);

/// Applies the tensor-parallel plan, activation checkpointing and fully_shard. `mesh` has an axis dp, and may have
/// replicate and tp.
void lay_out(Gpt& model, const DeviceMesh& mesh, const LayoutOptions& options);

}  // namespace tessera::examples
