#pragma once
// How a decoder is distributed over a mesh of ranks: tensor parallelism, recomputation and sharding, in one value.
//
//   auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
//   models::lay_out(model, mesh, {.sequence_parallel = true, .recompute = models::Recompute::Full});
//
// Thread safety: one thread per rank.

#include <string>

#include "activation_checkpoint/checkpoint_options.h"
#include "device_mesh/device_mesh.h"
#include "fully_shard/fully_shard.h"
#include "models/decoder.h"
#include "parallel/parallel_style.h"

namespace tessera::models {

/// What backward computes again of each layer.
using tessera::Recompute;

struct DecoderLayout {
  bool sequence_parallel = false;  // shards activations between matrices along the sequence over "tp"
  bool expert_parallel = false;    // whole experts over "tp", not a part of each; needs sequence_parallel
  Recompute recompute = Recompute::None;
  MixedPrecisionPolicy precision = {};  // of fully_shard's units: each layer, and the rest
  bool reshard_after_forward = true;    // of layers

  std::string to_string() const;
};

/// Returns the plan of a decoder: matrices by columns and then by rows, so that a layer sends twice, and embedding and
/// output layer by vocabulary. Heads need not divide by the ranks. Of `layout`, the two kinds of parallelism count.
ParallelPlan tensor_parallel_plan(const DecoderConfig& config, const DecoderLayout& layout = {});

/// Applies tensor parallelism over the axis "tp", recomputation, and fully_shard over "dp" and, as replicas,
/// "replicate". Each axis may be absent. Collective. Throws ValueError for other axes, and if sequence_parallel has no
/// axis "tp" or expert_parallel lacks what it needs; also what parallelize_module and fully_shard throw.
void lay_out(Decoder& model, const DeviceMesh& mesh, const DecoderLayout& layout = {});

}  // namespace tessera::models
