#pragma once
// Distribution of a decoder over a mesh of ranks: tensor parallelism, recomputation and sharding in one value.
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

/// Which activations of each layer backward recomputes.
using tessera::Recompute;

struct DecoderLayout {
  bool sequence_parallel = false;  // shard activations between matrices along the sequence over "tp"
  bool expert_parallel = false;    // whole experts over "tp", instead of a part of each; needs sequence_parallel
  Recompute recompute = Recompute::None;
  MixedPrecisionPolicy precision = {};  // for fully_shard's units: each layer, and the rest
  bool reshard_after_forward = true;    // for layers

  std::string to_string() const;
};

/// Returns the tensor-parallel plan of a decoder. It shards matrices by columns and then by rows, so that a layer
/// communicates twice, and embedding and output layer by vocabulary. The number of heads need not be divisible by the
/// number of ranks. Only the two parallelism options of `layout` matter.
ParallelPlan tensor_parallel_plan(const DecoderConfig& config, const DecoderLayout& layout = {});

/// Applies tensor parallelism over the axis "tp", recomputation, and fully_shard over "dp" with replicas over
/// "replicate". Each axis is optional. Collective. Throws ValueError for other axes, if sequence_parallel is set
/// without an axis "tp", or if expert_parallel lacks its requirements; also throws like parallelize_module and
/// fully_shard.
void lay_out(Decoder& model, const DeviceMesh& mesh, const DecoderLayout& layout = {});

}  // namespace tessera::models
