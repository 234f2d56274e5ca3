#pragma once
// What the common test models have in common: inputs, loss and backward of their own, and a factory, so that one
// trainer runs them all (testing/fsdp_models/train_steps.h).
//
//   auto model = nested_wrapped_model().init({.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE,
//                                             .deterministic = true});
//   auto input = model->get_input(at::kCPU);
//   auto loss = model->get_loss(input, model->forward(input));       // forward runs the hooks
//   model->run_backward(loss);
//
// Deterministic models are the ones of torch/testing/_internal/common_fsdp.py to the last bit on a CPU: same layers,
// same seeds, same order of draws. A model's parameters are drawn before anything is wrapped (wrapping draws nothing),
// under a lock, because ranks as threads share the default generator.
//
// Thread safety: a model is for the thread of its rank; factories may run in several threads.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fully_shard/fully_shard.h"

namespace tessera::testing {

/// The plain model, or nested units.
enum class FSDPInitMode { NO_FSDP, RECURSIVE };
/// Move to the device and then wrap; wrap and then move; stay where it was built (on the CPU).
enum class DEVICEInitMode { DEVICE_BEFORE, DEVICE_AFTER, DEVICE_NEVER };

std::string to_string(FSDPInitMode mode);
std::string to_string(DEVICEInitMode mode);

class FSDPTestModel : public torch::nn::Module {
 public:
  virtual std::vector<at::Tensor> get_input(at::Device device) = 0;
  /// The model's holder is declared by TESSERA_MODULE, whose type overrides this with the hooks around it.
  virtual at::Tensor forward(std::vector<at::Tensor> inputs) = 0;
  virtual at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) = 0;
  virtual void run_backward(const at::Tensor& loss) { loss.backward(); }
};

/// Makes a module a unit: fully_shard, or what a test puts in its place.
using ShardFn = std::function<void(torch::nn::Module&, const FullyShardOptions&)>;

struct InitOptions {
  /// The ranks that share the model; of a mesh with two axes (replicas, shards) the model itself sees the second.
  DeviceMesh mesh;
  FSDPInitMode fsdp_init_mode = FSDPInitMode::NO_FSDP;
  DEVICEInitMode device_init_mode = DEVICEInitMode::DEVICE_BEFORE;
  /// For all units of the model; its mesh is that above unless one is given.
  FullyShardOptions fsdp_options = {};
  ShardFn shard = nullptr;
  bool deterministic = false;
  at::Device device = at::kCPU;
  /// What all parameters are cast to before anything is wrapped. Default: float32, as they are drawn.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// TransformerWithSharedParams only.
  bool add_bn = true;

  int rank() const { return static_cast<int>(mesh.local_rank(mesh.ndim() - 1)); }
  int world_size() const { return static_cast<int>(mesh.size(mesh.ndim() - 1)); }
};

/// What every model's init does once its layers are drawn: cast, move, `wrap` if RECURSIVE, move if that comes last.
/// Throws ValueError for a mode that is none of the enumerators.
std::shared_ptr<FSDPTestModel> finish_init(std::shared_ptr<FSDPTestModel> model, const InitOptions& options,
                                           const std::function<void()>& wrap);

/// Makes `module` a unit as `options` say, over their mesh or another one.
void wrap_unit(torch::nn::Module& module, const InitOptions& options, std::optional<DeviceMesh> mesh = std::nullopt);

/// A model and its name, for drivers that build several of it.
struct ModelClass {
  std::string name;
  /// Throws ValueError for a mode that is none of the enumerators.
  std::function<std::shared_ptr<FSDPTestModel>(const InitOptions&)> init;
};

/// Only the scope's thread builds a model; with a seed, from that state of the default generator. Whoever draws from it
/// beside such scopes, as libtorch's layers do when they are made, needs one too.
class BuildScope {
 public:
  explicit BuildScope(std::optional<uint64_t> seed);

 private:
  std::unique_lock<std::mutex> lock_;
};

/// parameters(), but each tensor once: libtorch lists tied ones twice, and an optimizer would step them twice.
std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module);

/// The module that the harness reaches the model through, with one child named "module".
class DummyDDP : public FSDPTestModel {
 public:
  explicit DummyDDP(std::shared_ptr<FSDPTestModel> module);
  std::vector<at::Tensor> get_input(at::Device device) override { return module->get_input(device); }
  at::Tensor forward(std::vector<at::Tensor> inputs) override { return module->forward(std::move(inputs)); }
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override {
    return module->get_loss(input, output);
  }
  void run_backward(const at::Tensor& loss) override { module->run_backward(loss); }

  std::shared_ptr<FSDPTestModel> module;
};

}  // namespace tessera::testing
