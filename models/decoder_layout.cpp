#include "models/decoder_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "parallel/linear_styles.h"
#include "parallel/parallelize_module.h"
#include "parallel/prepare_module.h"
#include "parallel/sequence_parallel.h"
#include "parallel/style_tensors.h"

namespace tessera::models {

namespace {

bool has_axis(const DeviceMesh& mesh, std::string_view name) {
  return std::ranges::find(mesh.axis_names(), name) != mesh.axis_names().end();
}

void check_axes(const DeviceMesh& mesh, const DecoderLayout& layout) {
  for (const auto& name : mesh.axis_names()) {
    TESSERA_CHECK(ValueError, name == "dp" || name == "replicate" || name == "tp",
                  "lay_out: the mesh has an axis \"{}\"; allowed are \"dp\", \"replicate\" and \"tp\"", name);
  }
  TESSERA_CHECK(ValueError, !mesh.axis_names().empty() && (!has_axis(mesh, "replicate") || has_axis(mesh, "dp")),
                "lay_out: the mesh has the axes [{}]; name them, and give \"dp\" beside \"replicate\"",
                fmt::join(mesh.axis_names(), ", "));
  TESSERA_CHECK(ValueError, !layout.sequence_parallel || has_axis(mesh, "tp"),
                "lay_out: sequence_parallel needs an axis \"tp\" of the mesh, which has [{}]",
                fmt::join(mesh.axis_names(), ", "));
}

void shard(Decoder& model, const DeviceMesh& mesh, const DecoderLayout& layout) {
  const DeviceMesh data_parallel = has_axis(mesh, "replicate") ? mesh[{"replicate", "dp"}] : mesh["dp"];
  for (auto& layer : model->layers) {
    fully_shard(
        layer,
        {.mesh = data_parallel, .reshard_after_forward = layout.reshard_after_forward, .mp_policy = layout.precision});
  }
  fully_shard(model, {.mesh = data_parallel, .mp_policy = layout.precision});
}

/// Replicates what attention and MLP get, once for the matrices in them: each of these would do it for itself.
class ReplicatedInput : public ParallelStyle {
 public:
  std::string name() const override { return "ReplicatedInput"; }
  void check(const StyleTarget& target) const override { hook_point(target.module, describe(target)); }
  void apply(const StyleTarget& target) const override {
    hook_point(target.module, describe(target))
        .register_forward_pre_hook([mesh = target.mesh, where = describe(target)](HookPoint&, TensorRefs inputs) {
          *inputs[0] = style_input(*inputs[0], mesh, Replicate(), Replicate(), {.where = where});
        });
  }
};

std::string name_of(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "as stored";
}

}  // namespace

std::string DecoderLayout::to_string() const {
  return fmt::format("sequence_parallel: {}, recompute: {}, computes in: {}, reduces in: {}, reshard_after_forward: {}",
                     sequence_parallel, recompute == Recompute::Full ? "full" : "none", name_of(precision.param_dtype),
                     name_of(precision.reduce_dtype), reshard_after_forward);
}

ParallelPlan tensor_parallel_plan(const DecoderConfig& config, bool sequence_parallel) {
  const Placement residual = sequence_parallel ? Placement(Shard(1)) : Placement(Replicate());
  const ColwiseParallel columns;
  const RowwiseParallel rows({.output_layouts = residual, .use_local_output = !sequence_parallel});
  ParallelPlan plan{
      {"embed_tokens", rows},
      {"layers.*.self_attn", ReplicatedInput()},
      {"layers.*.mlp", ReplicatedInput()},
      {"layers.*.self_attn.[qkv]_proj", columns},
      {"layers.*.self_attn.o_proj", rows},
      {"layers.*.mlp.up_proj", columns},
      {"layers.*.mlp.down_proj", rows},
  };
  if (config.gated_mlp) {
    plan.add("layers.*.mlp.gate_proj", columns);
  }
  if (config.qk_norm) {  // by heads, dim 2 of [batch, length, heads, head_dim]
    plan.add("layers.*.self_attn.[qk]_norm", SequenceParallel({.sequence_dim = 2}));
  }
  if (config.tie_word_embeddings) {  // computes with the rows of embed_tokens
    plan.add("lm_head", PrepareModuleInputOutput(
                            {.input = {.input_layouts = {Replicate()}, .desired_input_layouts = {Replicate()}},
                             .output = {.output_layouts = {Shard(-1)}, .desired_output_layouts = {Replicate()}}}));
  } else {
    plan.add("lm_head", ColwiseParallel({.output_layouts = Replicate()}));
  }
  if (sequence_parallel) {
    for (const char* norm : {"layers.*.attention_norm", "layers.*.mlp_norm", "norm"}) {
      plan.add(norm, SequenceParallel());
    }
    if (config.sandwich_norms) {
      plan.add("layers.*.attention_out_norm", SequenceParallel());
      plan.add("layers.*.mlp_out_norm", SequenceParallel());
    }
    if (!config.rotary) {
      plan.add("embed_positions",
               PrepareModuleOutput(
                   {.output_layouts = {Replicate()}, .desired_output_layouts = {Shard(1)}, .use_local_output = false}));
    }
  }
  return plan;
}

void lay_out(Decoder& model, const DeviceMesh& mesh, const DecoderLayout& layout) {
  check_axes(mesh, layout);
  if (has_axis(mesh, "tp")) {
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model->config, layout.sequence_parallel));
  }
  if (layout.recompute == Recompute::Full) {
    for (auto& layer : model->layers) {
      checkpoint_module(*layer);
    }
  }
  if (has_axis(mesh, "dp")) {
    shard(model, mesh, layout);
  }
}

}  // namespace tessera::models
