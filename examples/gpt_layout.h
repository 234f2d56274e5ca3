#pragma once
// How a GPT lies on a mesh of ranks: the whole recipe, in the order in which the parts must come.
//
//   Gpt model = make_model(config, seed, {.bf16 = true});
//   DeviceMesh mesh = make_mesh({.tp = 2}, at::kCPU);                   // of 8 ranks: {replicate: 1, dp: 4, tp: 2}
//   lay_out(model, mesh, {.bf16 = true});

#include <c10/core/DeviceType.h>

#include <cstdint>

#include "device_mesh/device_mesh.h"
#include "examples/gpt_model.h"

namespace tessera::examples {

/// Ranks along each axis.
struct MeshShape {
  /// Data-parallel shards: the parameters are cut over them. 0: all ranks that the other axes leave.
  int64_t dp = 0;
  /// Copies of the data-parallel shards.
  int64_t replicate = 1;
  /// Tensor parallelism: matrices are cut over them, and they see the same data.
  int64_t tp = 1;
};

/// `shape` with dp filled in. Throws ValueError that names the options if they do not make `world_size` ranks.
MeshShape checked_shape(MeshShape shape, int64_t world_size);

/// Of all ranks, with the axes replicate, dp and tp.
DeviceMesh make_mesh(const MeshShape& shape, c10::DeviceType device);

struct LayoutOptions {
  /// Where parameters lie and compute; on CUDA the current device.
  c10::DeviceType device = c10::DeviceType::CPU;
  /// Gather and compute in bfloat16.
  bool bf16 = false;
  /// Activations between the matrices are cut along the sequence over tp, in place of each rank holding them whole.
  bool sequence_parallel = false;
  /// Backward computes the blocks again.
  bool checkpoint_activations = false;
  /// The model is built without memory, so that no rank ever holds more than its parts.
  bool meta_init = false;
};

/// A model as `options` have it: with its values, on its device, or without memory, which materialize() gives it after
/// lay_out.
Gpt make_model(const GptConfig& config, uint64_t seed, const LayoutOptions& options);

/// Memory on the device and initial values for this rank's parts: those of make_model without meta_init, bit by bit.
void materialize(Gpt& model, uint64_t seed, c10::DeviceType device);

/// Tensor-parallel plan, activation checkpointing, fully_shard. `mesh` has an axis dp, and may have replicate and tp.
void lay_out(Gpt& model, const DeviceMesh& mesh, const LayoutOptions& options);

}  // namespace tessera::examples
