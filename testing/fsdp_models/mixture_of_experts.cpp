#include "testing/fsdp_models/mixture_of_experts.h"

#include "comm/collectives.h"
#include "device_mesh/device_mesh.h"

namespace tessera::testing {

namespace {

using tessera::nn::Linear;

std::optional<uint64_t> seed_if(bool deterministic, uint64_t seed) {
  return deterministic ? std::optional(seed) : std::nullopt;
}

/// Returns a mesh of this rank alone.
DeviceMesh mesh_of_this_rank(const DeviceMesh& mesh) {
  return init_device_mesh(mesh.device_type(), {get_world_size(), 1}, {"all_ranks", "this_rank"})["this_rank"];
}

}  // namespace

MixtureOfExpertsImpl::MixtureOfExpertsImpl(const InitOptions& options)
    : NestedWrappedModuleImpl(options, NoLayers()),
      mesh_(options.mesh),
      is_wrapped_(options.fsdp_init_mode == FSDPInitMode::RECURSIVE) {
  Linear expert{nullptr};
  {
    const BuildScope build(seed_if(options.deterministic, static_cast<uint64_t>(42 + rank_)));
    expert = Linear(23, 12);
  }
  for (const auto& parameter : expert->parameters()) {
    num_expert_params += parameter.numel();
  }
  const BuildScope build(seed_if(options.deterministic, 0));
  const Linear shared(12, 23);
  const Linear in(8, 12);
  const Linear out(12, 8);
  tessera::nn::Sequential layers;
  layers->push_back(in);
  layers->push_back(shared);
  layers->push_back(expert);
  layers->push_back(out);
  module = register_module("module", layers);
}

at::Tensor MixtureOfExpertsImpl::forward(std::vector<at::Tensor> inputs) {
  return module(inputs.at(0));
}

bool MixtureOfExpertsImpl::is_expert(const at::Tensor& parameter) const {
  for (const auto& own : expert().parameters()) {
    if (own.is_same(parameter)) {
      return true;
    }
  }
  return false;
}

void MixtureOfExpertsImpl::run_backward(const at::Tensor& loss) {
  loss.backward();
  if (is_wrapped_ || world_size_ == 1) {
    return;
  }
  const auto& group = mesh_.group(mesh_.ndim() - 1);
  for (auto& parameter : parameters()) {
    if (parameter.grad().defined() && !is_expert(parameter)) {
      parameter.mutable_grad().div_(world_size_);
      all_reduce(parameter.mutable_grad(), ReduceOp::Sum, group);
    }
  }
}

const ModelClass& mixture_of_experts() {
  static const ModelClass model{"MixtureOfExperts", [](const InitOptions& options) {
                                  MixtureOfExperts model(options);
                                  return finish_init(model.ptr(), options, [&] {
                                    wrap_unit(model->expert(), options, mesh_of_this_rank(options.mesh));
                                    wrap_unit(model->shared(), options);
                                  });
                                }};
  return model;
}

}  // namespace tessera::testing
