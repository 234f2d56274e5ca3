#include "models/decoder_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "activation_checkpoint/checkpoint.h"
#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "parallel/experimental/expert_parallel.h"
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

void check_experts_apart(const DecoderConfig& config, const DecoderLayout& layout) {
  TESSERA_CHECK(ValueError, !layout.expert_parallel || (config.moe && layout.sequence_parallel),
                "lay_out: expert_parallel needs a model with experts, and sequence_parallel, by which each rank of "
                "\"tp\" has tokens of its own; this is a {}{}",
                config.model_type, layout.sequence_parallel ? "" : " without sequence_parallel");
}

void shard(Decoder& model, const DeviceMesh& mesh, const DecoderLayout& layout) {
  const DeviceMesh data_parallel = has_axis(mesh, "replicate") ? mesh[{"replicate", "dp"}] : mesh["dp"];
  FullyShardOptions options{
      .mesh = data_parallel, .reshard_after_forward = layout.reshard_after_forward, .mp_policy = layout.precision};
  if (model->config.moe) {  // each rank has a part of each expert, because there may be more ranks than experts
    options.shard_placement_fn = [](const at::Tensor& parameter) {
      return parameter.dim() == 3 ? std::optional(Shard(1)) : std::nullopt;
    };
  }
  for (auto& layer : model->layers) {
    fully_shard(layer, options);
  }
  fully_shard(model, {.mesh = data_parallel, .mp_policy = layout.precision});
}

/// Replicates the input of attention or MLP once for all matrices in it, each of which would do it separately.
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

/// Distributes parameters of a module that computes with its local tensors.
class PlacedParameters : public ParallelStyle {
 public:
  explicit PlacedParameters(std::map<std::string, Placement> placements) : placements_(std::move(placements)) {}

  std::string name() const override { return "PlacedParameters"; }
  void check(const StyleTarget& target) const override {
    for (const auto& [name, placement] : placements_) {
      check_style_parameter(*this, target, target.module, name, placement);
    }
  }
  void apply(const StyleTarget& target) const override {
    for (const auto& [name, placement] : placements_) {
      distribute_style_parameter(*this, target, target.module, name, placement);
    }
  }

 private:
  std::map<std::string, Placement> placements_;
};

Placement residual_of(const DecoderLayout& layout) {
  return layout.sequence_parallel ? Placement(Shard(1)) : Placement(Replicate());
}

void add_mlp(ParallelPlan& plan, const std::string& mlp, const DecoderConfig& config, const DecoderLayout& layout) {
  plan.add(mlp, ReplicatedInput());
  plan.add(mlp + ".up_proj", ColwiseParallel());
  plan.add(mlp + ".down_proj",
           RowwiseParallel({.output_layouts = residual_of(layout), .use_local_output = !layout.sequence_parallel}));
  if (config.gated_mlp) {
    plan.add(mlp + ".gate_proj", ColwiseParallel());
  }
}

/// Adds a layer's experts. The router computes on each rank, for all tokens or, with whole experts, for the rank's own.
void add_moe(ParallelPlan& plan, const std::string& moe, const DecoderLayout& layout) {
  const Placement residual = residual_of(layout);
  const Placement inside = layout.expert_parallel ? residual : Placement(Replicate());
  const Placement result = layout.expert_parallel ? residual : Placement(Partial());
  plan.add(moe, PrepareModuleInputOutput({.input = {.input_layouts = {residual}, .desired_input_layouts = {inside}},
                                          .output = {.output_layouts = {result},
                                                     .desired_output_layouts = {residual},
                                                     .use_local_output = !layout.sequence_parallel}}));
  plan.add(moe + ".router", PlacedParameters({{"weight", Replicate()}}));
  if (layout.expert_parallel) {
    plan.add(moe + ".experts", ExpertParallel());
  } else {
    plan.add(moe + ".experts",
             PlacedParameters({{"gate_proj", Shard(1)}, {"up_proj", Shard(1)}, {"down_proj", Shard(2)}}));
  }
}

std::string name_of(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "as stored";
}

}  // namespace

std::string DecoderLayout::to_string() const {
  return fmt::format(
      "sequence_parallel: {}, expert_parallel: {}, recompute: {}, computes in: {}, reduces in: {}, "
      "reshard_after_forward: {}",
      sequence_parallel, expert_parallel, tessera::to_string(recompute), name_of(precision.param_dtype),
      name_of(precision.reduce_dtype), reshard_after_forward);
}

ParallelPlan tensor_parallel_plan(const DecoderConfig& config, const DecoderLayout& layout) {
  const RowwiseParallel rows({.output_layouts = residual_of(layout), .use_local_output = !layout.sequence_parallel});
  ParallelPlan plan{
      {"embed_tokens", rows},
      {"layers.*.self_attn", ReplicatedInput()},
      {"layers.*.self_attn.[qkv]_proj", ColwiseParallel()},
      {"layers.*.self_attn.o_proj", rows},
  };
  for (int64_t layer = 0; config.moe && layer < config.num_hidden_layers; ++layer) {
    const auto mlp = fmt::format("layers.{}.mlp", layer);
    config.is_sparse(layer) ? add_moe(plan, mlp, layout) : add_mlp(plan, mlp, config, layout);
  }
  if (!config.moe) {
    add_mlp(plan, "layers.*.mlp", config, layout);
  }
  if (config.qk_norm) {  // sharded by heads, dim 2 of [batch, length, heads, head_dim]
    plan.add("layers.*.self_attn.[qk]_norm", SequenceParallel({.sequence_dim = 2}));
  }
  if (config.tie_word_embeddings) {  // uses the rows of embed_tokens
    plan.add("lm_head", PrepareModuleInputOutput(
                            {.input = {.input_layouts = {Replicate()}, .desired_input_layouts = {Replicate()}},
                             .output = {.output_layouts = {Shard(-1)}, .desired_output_layouts = {Replicate()}}}));
  } else {
    plan.add("lm_head", ColwiseParallel({.output_layouts = Replicate()}));
  }
  if (layout.sequence_parallel) {
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
  check_experts_apart(model->config, layout);
  if (has_axis(mesh, "tp")) {
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model->config, layout));
  }
  if (layout.recompute != Recompute::None) {
    for (auto& layer : model->layers) {
      checkpoint_module(*layer, checkpoint_options(layout.recompute));
    }
  }
  if (has_axis(mesh, "dp")) {
    shard(model, mesh, layout);
  }
}

}  // namespace tessera::models
