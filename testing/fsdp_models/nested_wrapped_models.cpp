#include "testing/fsdp_models/nested_wrapped_models.h"

#include <ATen/ops/rand.h>

#include <regex>

#include "testing/run_ranks.h"

namespace tessera::testing {

namespace {

using tessera::nn::Linear;
using tessera::nn::Sequential;

/// Uses one statement per layer, since layers draw in order of construction.
Sequential chain(std::initializer_list<std::pair<int64_t, int64_t>> sizes) {
  Sequential layers;
  for (const auto& [in, out] : sizes) {
    layers->push_back(Linear(in, out));
  }
  return layers;
}

void wrap_nested(NestedWrappedModuleImpl& model, const InitOptions& options) {
  const auto inner = model.module->ptr(1);
  wrap_unit(*inner->children().at(0), options);
  wrap_unit(*inner, options);
  wrap_unit(*model.module->ptr(2), options);
}

/// Wraps every module below `module` bottom-up, then `module` itself.
void wrap_every_module(torch::nn::Module& module, const InitOptions& options) {
  for (const auto& child : module.children()) {
    wrap_every_module(*child, options);
  }
  wrap_unit(module, options);
}

}  // namespace

NestedWrappedModuleImpl::NestedWrappedModuleImpl(const InitOptions& options, NoLayers)
    : rank_(options.rank()), world_size_(options.world_size()) {}

NestedWrappedModuleImpl::NestedWrappedModuleImpl(const InitOptions& options)
    : NestedWrappedModuleImpl(options, NoLayers()) {
  const BuildScope build(options.deterministic ? std::optional<uint64_t>(0) : std::nullopt);
  Sequential layers;
  layers->push_back(Linear(8, 4));
  layers->push_back(chain({{4, 16}, {16, 16}}));
  layers->push_back(Linear(16, 4));
  layers->push_back(Linear(4, 8));
  module = register_module("module", layers);
}

std::vector<at::Tensor> NestedWrappedModuleImpl::get_input(at::Device device) {
  return {at::rand({4, 8}, make_generator(static_cast<uint64_t>(1 + rank_))).to(device)};
}

at::Tensor NestedWrappedModuleImpl::forward(std::vector<at::Tensor> inputs) {
  return module(inputs.at(0));
}

at::Tensor NestedWrappedModuleImpl::get_loss(const std::vector<at::Tensor>&, const at::Tensor& output) {
  return output.sum();
}

NonUniformReqGradNWMImpl::NonUniformReqGradNWMImpl(const InitOptions& options)
    : NestedWrappedModuleImpl(options, NoLayers()) {
  const BuildScope build(options.deterministic ? std::optional<uint64_t>(0) : std::nullopt);
  Sequential layers;
  layers->push_back(Linear(8, 4));
  layers->push_back(chain({{4, 16}, {16, 16}}));
  layers->push_back(chain({{16, 4}, {4, 8}}));
  module = register_module("module", layers);
}

void freeze_all_but_last(torch::nn::Module& model) {
  static const std::regex trained(R"(^module\.2.*\.1.*)");
  for (auto& item : model.named_parameters()) {
    item.value().set_requires_grad(std::regex_search(item.key(), trained));
  }
}

const ModelClass& nested_wrapped_model() {
  static const ModelClass model{"NestedWrappedModule", [](const InitOptions& options) {
                                  NestedWrappedModule model(options);
                                  return finish_init(model.ptr(), options, [&] { wrap_nested(*model, options); });
                                }};
  return model;
}

const ModelClass& always_wrap_nested_wrapped_model() {
  static const ModelClass model{"AlwaysWrapNestedWrappedModule", [](const InitOptions& options) {
                                  NestedWrappedModule model(options);
                                  return finish_init(model.ptr(), options, [&] { wrap_every_module(*model, options); });
                                }};
  return model;
}

const ModelClass& non_uniform_req_grad_model() {
  static const ModelClass model{"NonUniformReqGradNWM", [](const InitOptions& options) {
                                  NonUniformReqGradNWM model(options);
                                  freeze_all_but_last(*model);
                                  return finish_init(model.ptr(), options, [&] { wrap_nested(*model, options); });
                                }};
  return model;
}

}  // namespace tessera::testing
