#pragma once
// Interface of the test models: inputs, loss, backward, and a factory, so that one trainer runs them all
// (testing/fsdp_models/train_steps.h).
//
//   auto model = nested_wrapped_model().init({.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE,
//                                             .deterministic = true});
//   auto input = model->get_input(at::kCPU);
//   auto loss = model->get_loss(input, model->forward(input));       // forward runs the hooks
//   model->run_backward(loss);
//
// Deterministic models equal those of torch/testing/_internal/common_fsdp.py bit by bit on a CPU: same layers, seeds
// and order of draws. Parameters are drawn before anything is wrapped (wrapping draws nothing), under a lock, as ranks
// that are threads share the default generator.
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

#include "fsdp1/fsdp_options.h"
#include "fully_shard/fully_shard.h"

namespace tessera::testing {

/// Plain model, or nested units.
enum class FSDPInitMode { NO_FSDP, RECURSIVE };
/// Move to the device and then wrap; wrap and then move; or stay on the CPU.
enum class DEVICEInitMode { DEVICE_BEFORE, DEVICE_AFTER, DEVICE_NEVER };

std::string to_string(FSDPInitMode mode);
std::string to_string(DEVICEInitMode mode);

class FSDPTestModel : public torch::nn::Module {
 public:
  virtual std::vector<at::Tensor> get_input(at::Device device) = 0;
  /// Overridden by the type that TESSERA_MODULE declares, with hooks around it.
  virtual at::Tensor forward(std::vector<at::Tensor> inputs) = 0;
  virtual at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) = 0;
  virtual void run_backward(const at::Tensor& loss) { loss.backward(); }
};

/// Makes a module a unit: fully_shard, or a test's replacement.
using ShardFn = std::function<void(torch::nn::Module&, const FullyShardOptions&)>;

struct InitOptions {
  /// Ranks that share the model; of a mesh with two axes (replicas, shards) the model itself sees the second.
  DeviceMesh mesh;
  FSDPInitMode fsdp_init_mode = FSDPInitMode::NO_FSDP;
  DEVICEInitMode device_init_mode = DEVICEInitMode::DEVICE_BEFORE;
  /// Options of all units; their mesh is the one above by default.
  FullyShardOptions fsdp_options = {};
  ShardFn shard = nullptr;
  /// Wraps units in FullyShardedDataParallel with these options, instead of the two above, over the same mesh.
  std::optional<FSDPOptions> wrapper_options = std::nullopt;
  bool deterministic = false;
  at::Device device = at::kCPU;
  /// Dtype of all parameters before wrapping. Default: float32, as drawn.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// For TransformerWithSharedParams only.
  bool add_bn = true;

  int rank() const { return static_cast<int>(mesh.local_rank(mesh.ndim() - 1)); }
  int world_size() const { return static_cast<int>(mesh.size(mesh.ndim() - 1)); }
};

/// Finishes a model's init: casts, moves, calls `wrap` if RECURSIVE, and moves if that comes last. Throws ValueError
/// for an unknown mode.
std::shared_ptr<FSDPTestModel> finish_init(std::shared_ptr<FSDPTestModel> model, const InitOptions& options,
                                           const std::function<void()>& wrap);

/// Makes `module` a unit by `options`, over their mesh or another one. On one axis, hybrid strategies have no replicas.
void wrap_unit(torch::nn::Module& module, const InitOptions& options, std::optional<DeviceMesh> mesh = std::nullopt);

/// A model and its name, for drivers that build several.
struct ModelClass {
  std::string name;
  /// Throws ValueError for an unknown mode.
  std::function<std::shared_ptr<FSDPTestModel>(const InitOptions&)> init;
};

/// Lets only this thread build a model; with a seed, from that state of the default generator. Other code that draws
/// from it concurrently, such as constructors of libtorch's layers, needs such a scope too.
class BuildScope {
 public:
  explicit BuildScope(std::optional<uint64_t> seed);

 private:
  std::unique_lock<std::mutex> lock_;
};

/// Returns parameters() without repeated (tied) tensors, which an optimizer would update twice.
std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module);

/// Module through which the harness reaches the model, with one child named "module".
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
