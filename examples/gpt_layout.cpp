#include "examples/gpt_layout.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "comm/process_group.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/to_empty.h"
#include "nn/meta_device.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "parallel/prepare_module.h"
#include "parallel/sequence_parallel.h"

namespace tessera::examples {

namespace {

bool has_axis(const DeviceMesh& mesh, std::string_view name) {
  const auto& names = mesh.axis_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Shards matrices by columns and then by rows, so that a block communicates twice: for attention and for the MLP. In
/// between, activations stay DTensors, so that the model's view() into heads sees the number of all heads.
ParallelPlan tensor_parallel_plan(bool sequence_parallel) {
  const Placement residual = sequence_parallel ? Placement(Shard(1)) : Placement(Replicate());
  const ColwiseParallel columns;
  const RowwiseParallel rows({.output_layouts = residual, .use_local_output = !sequence_parallel});
  ParallelPlan plan{
      {"token_embedding", rows},      {"block*.qkv", columns},
      {"block*.attention_out", rows}, {"block*.mlp_in", columns},
      {"block*.mlp_out", rows},       {"output", ColwiseParallel({.output_layouts = Replicate()})},
  };
  if (sequence_parallel) {
    plan.add("position_embedding",
             PrepareModuleOutput(
                 {.output_layouts = {Replicate()}, .desired_output_layouts = {Shard(0)}, .use_local_output = false}));
    plan.add("block*.attention_norm", SequenceParallel());
    plan.add("block*.mlp_norm", SequenceParallel());
    plan.add("norm", SequenceParallel());
  }
  return plan;
}

/// Makes each block a unit. Embeddings, last norm and output layer belong to the root.
void shard(Gpt& model, const DeviceMesh& mesh, bool bf16) {
  MixedPrecisionPolicy policy;
  if (bf16) {
    policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  }
  const bool has_replicas = has_axis(mesh, "replicate") && mesh.size("replicate") > 1;
  const DeviceMesh data_parallel = has_replicas ? mesh[{"replicate", "dp"}] : mesh["dp"];
  for (auto& block : model->blocks) {
    fully_shard(block, {.mesh = data_parallel, .mp_policy = policy});
  }
  fully_shard(model, {.mesh = data_parallel, .mp_policy = policy});
}

}  // namespace

MeshShape checked_shape(MeshShape shape, int64_t world_size) {
  TESSERA_CHECK(ValueError, shape.tp >= 1, "--tp {}: must be at least 1", shape.tp);
  TESSERA_CHECK(ValueError, shape.replicate >= 1, "--replicate {}: must be at least 1", shape.replicate);
  TESSERA_CHECK(ValueError, shape.dp >= 0, "--dp {}: must be at least 1, or 0 for what the other axes leave", shape.dp);
  const bool is_small =
      shape.tp <= world_size && shape.replicate <= world_size;  // so that the product does not overflow
  const int64_t others = is_small ? shape.tp * shape.replicate : 0;
  TESSERA_CHECK(ValueError, is_small && world_size % others == 0,
                "--tp {} and --replicate {}: their product must divide the {} ranks; start more with --nproc", shape.tp,
                shape.replicate, world_size);
  TESSERA_CHECK(ValueError, shape.dp == 0 || (world_size % shape.dp == 0 && shape.dp * others == world_size),
                "--dp {}: with --tp {} and --replicate {} it makes {} ranks, but there are {}; leave it out, or start "
                "{} with --nproc",
                shape.dp, shape.tp, shape.replicate, shape.dp * others, world_size, shape.dp * others);
  shape.dp = world_size / others;
  return shape;
}

DeviceMesh make_mesh(const MeshShape& shape, c10::DeviceType device) {
  const MeshShape whole = checked_shape(shape, get_world_size());
  return init_device_mesh(device, {whole.replicate, whole.dp, whole.tp}, {"replicate", "dp", "tp"});
}

Gpt make_model(const GptConfig& config, uint64_t seed, const LayoutOptions& options) {
  std::optional<MetaDeviceGuard> on_meta;
  if (options.meta_init) {
    on_meta.emplace();
  }
  Gpt model(config, seed);
  if (!options.meta_init && options.device != at::kCPU) {
    model->to(at::Device(options.device));
    model->initialize(seed);  // with the device's generator, like materialize()
  }
  return model;
}

void materialize(Gpt& model, uint64_t seed, c10::DeviceType device) {
  to_empty(model, at::Device(device));
  model->initialize(seed);
}

void lay_out(Gpt& model, const DeviceMesh& mesh, const LayoutOptions& options) {
  if (has_axis(mesh, "tp") && mesh.size("tp") > 1) {
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(options.sequence_parallel));
  }
  if (options.recompute != Recompute::None) {
    for (auto& block : model->blocks) {
      checkpoint_module(*block, checkpoint_options(options.recompute));
    }
  }
  shard(model, mesh, options.bf16);
}

}  // namespace tessera::examples
