#include "lora/lora.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/close_names.h"
#include "base/error.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/parameter_origin.h"
#include "fully_shard/fsdp_module.h"
#include "nn/linear.h"
#include "parallel/path_pattern.h"

namespace tessera {

namespace {

/// Linear layer with the first of its names.
struct NamedLinear {
  std::string path;
  std::shared_ptr<torch::nn::Module> module;
};

std::vector<NamedLinear> named_linears(const torch::nn::Module& root) {
  std::vector<NamedLinear> linears;
  std::set<const torch::nn::Module*> seen;
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (dynamic_cast<const torch::nn::LinearImpl*>(item.value().get()) && seen.insert(item.value().get()).second) {
      linears.push_back({item.key(), item.value()});
    }
  }
  return linears;
}

/// Returns the last `count` components of a path, or all if it has fewer.
std::string last_components(const std::string& path, size_t count) {
  const auto names = path_components(path);
  const auto first = names.end() - static_cast<std::ptrdiff_t>(std::min(count, names.size()));
  return fmt::format("{}", fmt::join(first, names.end(), "."));
}

[[noreturn]] void throw_without_match(const std::string& pattern, const std::vector<NamedLinear>& linears) {
  const size_t count = path_components(pattern).size();
  std::vector<std::string> candidates;
  std::set<std::string> names;
  for (const auto& linear : linears) {
    candidates.push_back(generalized_path(pattern, last_components(linear.path, count)));
    names.insert(last_components(linear.path, 1));
  }
  const auto close = close_names(pattern, candidates);
  const auto hint = close.empty() ? fmt::format("their names: {}", fmt::join(names, ", "))
                                  : fmt::format("close ones: \"{}\"", fmt::join(close, "\", \""));
  throw KeyError(fmt::format("add_lora: target_modules has \"{}\", which matches none of the {} linear layers; {}",
                             pattern, linears.size(), hint));
}

std::vector<NamedLinear> find_targets(const torch::nn::Module& root, const std::vector<std::string>& patterns) {
  const auto linears = named_linears(root);
  std::vector<bool> is_target(linears.size());
  for (const auto& pattern : patterns) {
    const size_t count = path_components(pattern).size();
    bool has_match = false;
    for (size_t i = 0; i < linears.size(); ++i) {
      if (count > 0 && matches_path(pattern, last_components(linears[i].path, count))) {
        has_match = is_target[i] = true;
      }
    }
    if (!has_match) {
      throw_without_match(pattern, linears);
    }
  }
  std::vector<NamedLinear> targets;
  for (size_t i = 0; i < linears.size(); ++i) {
    if (is_target[i]) {
      targets.push_back(linears[i]);
    }
  }
  return targets;
}

void check_numbers(const LoraConfig& config) {
  TESSERA_CHECK(ValueError, !config.target_modules.empty(), "add_lora: target_modules is empty; name linear layers");
  TESSERA_CHECK(ValueError, config.r >= 1, "add_lora: r is {}; it must be at least 1", config.r);
  TESSERA_CHECK(ValueError, std::isfinite(config.lora_alpha) && config.lora_alpha > 0,
                "add_lora: lora_alpha is {}; it must be above 0", config.lora_alpha);
  TESSERA_CHECK(ValueError, config.lora_dropout >= 0 && config.lora_dropout < 1,
                "add_lora: lora_dropout is {}; it must be in [0, 1)", config.lora_dropout);
}

/// Returns the number of modules that have each parameter.
std::map<const c10::TensorImpl*, int> count_owners(const torch::nn::Module& root) {
  std::map<const c10::TensorImpl*, int> owners;
  std::set<const torch::nn::Module*> modules{&root};
  for (const auto& module : root.modules(/*include_self=*/false)) {
    modules.insert(module.get());
  }
  for (const auto* module : modules) {
    for (const auto& item : module->named_parameters(/*recurse=*/false)) {
      ++owners[item.value().unsafeGetTensorImpl()];
    }
  }
  return owners;
}

void check_target(const NamedLinear& target, const std::map<const c10::TensorImpl*, int>& owners) {
  const auto* const linear = dynamic_cast<const nn::Linear::Impl*>(target.module.get());
  TESSERA_CHECK(StateError, linear,
                "add_lora: \"{}\" is a {}, and only a tessera::nn::Linear takes an adapter. Name such layers, or "
                "declare the member as tessera::nn::Linear",
                target.path, module_type_name(*target.module));
  const auto& weight = linear->weight;
  TESSERA_CHECK(StateError, !is_dtensor(weight) && !belongs_to_unit(weight),
                "add_lora: \"{}\" is sharded already; call add_lora before parallelize_module, fully_shard and "
                "replicate (models::from_pretrained has an option for it)",
                target.path);
  TESSERA_CHECK(ValueError, owners.at(weight.unsafeGetTensorImpl()) == 1,
                "add_lora: the weight of \"{}\" is another module's too, which would not get the adapter; leave the "
                "layer out of target_modules",
                target.path);
}

void attach_adapter(nn::Linear::Impl& linear, const LoraConfig& config) {
  const auto& weight = linear.weight;
  const auto dtype = c10::isReducedFloatingType(weight.scalar_type()) ? at::kFloat : weight.scalar_type();
  const auto options = at::TensorOptions(weight.device()).dtype(dtype);
  nn::LoraMatrix a(config.r, weight.size(1), nn::LoraInit::Random, options);
  nn::LoraMatrix b(weight.size(0), config.r, nn::LoraInit::Zeros, options);
  linear.register_module("lora_A", a);
  linear.register_module("lora_B", b);
  a->train(linear.is_training());
  linear.attach<LinearAdapter>(std::make_shared<nn::LoraAdapter>(
      a, b, nn::LoraScale{.r = config.r, .lora_alpha = config.lora_alpha, .use_rslora = config.use_rslora},
      config.lora_dropout));
}

void merge(const LoraLayer& layer) {
  auto& linear = dynamic_cast<nn::Linear::Impl&>(*layer.module);
  auto product = layer.adapter->product();
  if (is_dtensor(linear.weight)) {
    product = redistribute(product, placements(linear.weight));
  }
  linear.weight.add_(product);
  for (const auto& matrix : {layer.adapter->lora_A, layer.adapter->lora_B}) {
    matrix->weight.set_requires_grad(false);
  }
  linear.detach<LinearAdapter>();
  linear.unregister_module("lora_A");
  linear.unregister_module("lora_B");
}

}  // namespace

void add_lora(ModuleRef module, const LoraConfig& config) {
  check_numbers(config);
  const auto present = lora_layers(module);
  TESSERA_CHECK(StateError, present.empty(), "add_lora: \"{}\" has an adapter already; call merge_lora first",
                present.empty() ? "" : present[0].path);
  const auto targets = find_targets(*module, config.target_modules);
  const auto owners = count_owners(*module);
  for (const auto& target : targets) {
    check_target(target, owners);
  }
  for (auto& parameter : module->parameters()) {
    parameter.set_requires_grad(false);
  }
  for (const auto& target : targets) {
    attach_adapter(dynamic_cast<nn::Linear::Impl&>(*target.module), config);
  }
}

void merge_lora(ModuleRef module) {
  const auto layers = lora_layers(module);
  TESSERA_CHECK(StateError, !layers.empty(), "merge_lora: {} has no adapters", module_type_name(*module));
  reshard_all(module);
  const at::NoGradGuard no_grad;
  for (const auto& layer : layers) {
    merge(layer);
  }
}

std::vector<LoraLayer> lora_layers(ModuleRef module) {
  std::vector<LoraLayer> layers;
  for (const auto& [path, linear] : named_linears(*module)) {
    if (auto adapter = nn::find_lora_adapter(*linear)) {
      layers.push_back({path, linear, std::move(adapter)});
    }
  }
  return layers;
}

bool is_lora_parameter(std::string_view name) {
  return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight");
}

void reset_lora(ModuleRef module) {
  for (const auto& layer : lora_layers(module)) {
    nn::LoraMatrix(layer.adapter->lora_A)->reset_parameters();
    nn::LoraMatrix(layer.adapter->lora_B)->reset_parameters();
  }
}

}  // namespace tessera
