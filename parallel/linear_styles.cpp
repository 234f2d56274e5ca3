#include "parallel/linear_styles.h"

#include <c10/core/InferenceMode.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <optional>

#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/recomputable_call.h"
#include "nn/lora_adapter.h"
#include "parallel/style_tensors.h"

namespace tessera {

namespace {

enum class Layer { Linear, Embedding };

Layer known_layer(const ParallelStyle& style, const StyleTarget& target) {
  if (dynamic_cast<const torch::nn::LinearImpl*>(&target.module)) {
    return Layer::Linear;
  }
  const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&target.module);
  TESSERA_CHECK(NotImplementedError, embedding,
                "{}: a module of type {}, but the style knows how to cut torch::nn::LinearImpl and "
                "torch::nn::EmbeddingImpl. Name such a module in the plan, or derive a style from ParallelStyle",
                style.describe(target), module_type_name(target.module));
  TESSERA_CHECK(NotImplementedError, !embedding->options.sparse(),
                "{}: an Embedding with sparse gradients, and DTensors are dense; make it with sparse(false)",
                style.describe(target));
  return Layer::Embedding;
}

/// Placements of a layer's parameters. An Embedding has no bias.
struct ParameterPlacements {
  Placement weight;
  Placement bias = Replicate();
  Placement lora_A = Replicate(), lora_B = Replicate();  // of nn::LoraAdapter
};

/// An adapter's B has the rows of the layer's weight, and its A the columns.
ParameterPlacements colwise_parameters(Layer layer) {
  return layer == Layer::Linear ? ParameterPlacements{.weight = Shard(0), .bias = Shard(0), .lora_B = Shard(0)}
                                : ParameterPlacements{.weight = Shard(1)};
}

ParameterPlacements rowwise_parameters(Layer layer) {
  return layer == Layer::Linear ? ParameterPlacements{.weight = Shard(1), .lora_A = Shard(1)}
                                : ParameterPlacements{.weight = Shard(0)};
}

/// Calls `visit(module, name, placement)` for each parameter of the layer.
template <class Visit>
void for_each_parameter(const StyleTarget& target, const ParameterPlacements& placements, const Visit& visit) {
  visit(target.module, "weight", placements.weight);
  visit(target.module, "bias", placements.bias);
  if (const auto adapter = nn::find_lora_adapter(target.module)) {
    visit(*adapter->lora_A.ptr(), "weight", placements.lora_A);
    visit(*adapter->lora_B.ptr(), "weight", placements.lora_B);
  }
}

void check_layer(const ParallelStyle& style, const StyleTarget& target, const ParameterPlacements& placements) {
  hook_point(target.module, style.describe(target));
  const auto check = [&](const torch::nn::Module& module, const char* name, const Placement& placement) {
    check_style_parameter(style, target, module, name, placement);
  };
  for_each_parameter(target, placements, check);
}

/// Configuration of a layer's hooks.
struct LayerFlow {
  Placement input_layout, desired, output_layout;
  bool use_local_output = true;
  StyleInputOptions input;
  /// Features that a column-wise Linear accepts; a row-wise one's sharded input is checked with input.sharded_size.
  std::optional<int64_t> input_features = std::nullopt;
};

/// Checks the input after it was moved, on every rank. Otherwise the product would throw without naming the layer.
void check_input_features(const at::Tensor& input, const LayerFlow& flow) {
  TESSERA_CHECK(ValueError, !flow.input_features || input.dim() == 0 || input.size(-1) == *flow.input_features,
                "{}: the input has sizes [{}], but the layer takes {} features. If it is a rank's part of them, as "
                "a ColwiseParallel with use_local_output = true leaves it, make this layer RowwiseParallel, or set "
                "input_layouts = Shard(-1)",
                flow.input.where, fmt::join(input.sizes(), ", "), *flow.input_features);
}

void apply_layer(const ParallelStyle& style, const StyleTarget& target, const ParameterPlacements& placements,
                 const LayerFlow& flow) {
  const auto distribute = [&](torch::nn::Module& module, const char* name, const Placement& placement) {
    distribute_style_parameter(style, target, module, name, placement);
  };
  for_each_parameter(target, placements, distribute);
  auto& point = hook_point(target.module, flow.input.where);
  point.register_forward_pre_hook([flow, mesh = target.mesh](HookPoint&, TensorRefs inputs) {
    TESSERA_CHECK(ValueError, !inputs.empty(), "{}: forward was called with an undefined tensor", flow.input.where);
    *inputs[0] = style_input(*inputs[0], mesh, flow.input_layout, flow.desired, flow.input);
    check_input_features(*inputs[0], flow);
  });
  point.register_forward_hook([flow](HookPoint&, TensorRefs outputs) {
    *outputs[0] = style_output(*outputs[0], flow.output_layout,
                               {.where = flow.input.where, .use_local_output = flow.use_local_output});
  });
}

}  // namespace

void ColwiseParallel::check(const StyleTarget& target) const {
  check_layer(*this, target, colwise_parameters(known_layer(*this, target)));
}

void ColwiseParallel::apply(const StyleTarget& target) const {
  const auto layer = known_layer(*this, target);
  std::optional<int64_t> features;
  if (layer == Layer::Linear) {
    features = dynamic_cast<const torch::nn::LinearImpl&>(target.module).weight.size(1);
  }
  apply_layer(*this, target, colwise_parameters(layer),
              {.input_layout = options_.input_layouts,
               .desired = Replicate(),
               .output_layout = options_.output_layouts,
               .use_local_output = options_.use_local_output.value_or(options_.output_layouts.is_replicate()),
               .input = {.where = describe(target), .even_shards = options_.even_shards},
               .input_features = features});
}

void RowwiseParallel::check(const StyleTarget& target) const {
  check_layer(*this, target, rowwise_parameters(known_layer(*this, target)));
}

void RowwiseParallel::apply(const StyleTarget& target) const {
  const auto layer = known_layer(*this, target);
  const bool linear = layer == Layer::Linear;
  const Placement by_features = Shard(-1), whole = Replicate();
  const auto layout = options_.input_layouts.value_or(linear ? by_features : whole);
  StyleInputOptions input{.where = describe(target), .even_shards = options_.even_shards};
  if (linear && layout == by_features) {
    input.sharded_size = dynamic_cast<const torch::nn::LinearImpl&>(target.module).weight.size(1);
  }
  apply_layer(*this, target, rowwise_parameters(layer),
              {.input_layout = layout,
               .desired = linear ? by_features : whole,
               .output_layout = options_.output_layouts,
               .use_local_output = options_.use_local_output,
               .input = input});
}

}  // namespace tessera
