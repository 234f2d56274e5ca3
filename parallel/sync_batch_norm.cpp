#include "parallel/sync_batch_norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "dtensor/ops/norm/batch_statistics.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Ranks of a layer, and its description. Autograd does not treat it as a tensor.
struct SyncRanks : torch::CustomClassHolder {
  SyncRanks(const DeviceMesh& of, std::string name) : mesh(of), layer(std::move(name)) {
    for (size_t axis = 0; axis < mesh.shape().size(); ++axis) {
      if (mesh.shape()[axis] > 1) {
        axes.push_back(static_cast<int64_t>(axis));
      }
    }
  }

  DeviceMesh mesh;
  std::vector<int64_t> axes;  // with more than one rank
  std::string layer;
};
using SyncRanksPtr = c10::intrusive_ptr<SyncRanks>;

/// Arguments of a layer's call. Tensors except the input may be undefined.
struct BatchNormCall {
  at::Tensor input;  // [N, C, ...]
  at::Tensor weight, bias, running_mean, running_var;
  double momentum;
  double eps;
};

at::Tensor cast_like(const at::Tensor& gradient, const at::Tensor& tensor) {
  return tensor.defined() ? gradient.to(tensor.scalar_type()) : at::Tensor();
}

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

class SyncBatchNorm : public torch::autograd::Function<SyncBatchNorm> {
 public:
  /// The parameters repeat those of `call`, because autograd tracks arguments, which must be defined.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/, const std::optional<at::Tensor>& /*bias*/,
                            const BatchNormCall& call, const SyncRanksPtr& ranks) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto statistics = batch_statistics(input, ranks->mesh, ranks->axes);
    TESSERA_CHECK(ValueError, !statistics.count.is_cpu() || statistics.count.item<double>() > 1,
                  "{}: statistics need more than one value a channel, but the batches of all ranks together have {}",
                  ranks->layer, statistics.count.item<double>());
    const auto variance = statistics.variance();
    update_running_statistics(call.running_mean, call.running_var, statistics, call.momentum);
    context->save_for_backward(
        {input, call.weight, call.bias, statistics.mean, inverse_deviation(variance, call.eps), statistics.count});
    context->saved_data["ranks"] = c10::IValue::make_capsule(ranks);
    return normalized_items(input, call.weight, call.bias, statistics.mean, variance, call.eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["ranks"].toCapsule();
    const auto& ranks = static_cast<const SyncRanks&>(*capsule);
    TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                  "{}: backward with create_graph through a batch norm over several ranks. Leave the layer out of "
                  "convert_sync_batchnorm, or give the model a DTensor batch",
                  ranks.layer);
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto saved = context->get_saved_variables();
    const auto &input = saved[0], &weight = saved[1], &bias = saved[2];
    BatchNormGradient gradient(grads[0], input, saved[3], saved[4]);
    const auto of_weight = cast_like(gradient.of_weight(), weight), of_bias = cast_like(gradient.of_bias(), bias);
    gradient.add_up(ranks.mesh, ranks.axes);
    return {cast_like(gradient.of_items(weight, saved[5]), input), of_weight, of_bias, at::Tensor(), at::Tensor()};
  }
};

void check_channels(const BatchNormCall& call, const std::string& layer) {
  for (const auto* each : {&call.weight, &call.running_mean}) {
    TESSERA_CHECK(ValueError, !each->defined() || each->numel() == call.input.size(1),
                  "{}: an input of {} channels; the layer has {}", layer, call.input.size(1), each->numel());
  }
}

/// Hooks of a batch norm, which owns them. In training the layer's own forward gets an empty batch, so that it checks
/// the dims and counts the batch but computes nothing. Its result is replaced.
template <class Layer>
class SyncedLayer {
 public:
  SyncedLayer(const Layer& layer, SyncRanksPtr ranks) : layer_(layer), ranks_(std::move(ranks)) {}

  void before(const HookPoint& at, TensorRefs inputs) {
    input_ = at::Tensor();
    // Evaluation does not communicate even without running statistics, so that ranks may evaluate independently.
    if (inputs.empty() || inputs[0]->dim() < 2 || !layer_.is_training() || is_dtensor(*inputs[0])) {
      return;
    }
    TESSERA_CHECK(StateError, !at.is_forward_wrapped(),
                  "{}: activation checkpointing of the layer by itself; checkpoint the module around it",
                  ranks_->layer);
    input_ = std::exchange(*inputs[0], inputs[0]->detach().narrow(0, 0, 0));
  }

  void after(TensorRefs outputs) {
    if (!input_.defined()) {
      return;
    }
    const BatchNormCall call{.input = std::exchange(input_, at::Tensor()),
                             .weight = layer_.weight,
                             .bias = layer_.bias,
                             .running_mean = layer_.running_mean,
                             .running_var = layer_.running_var,
                             .momentum = momentum(),
                             .eps = layer_.options.eps()};
    check_channels(call, ranks_->layer);
    *outputs[0] = SyncBatchNorm::apply(call.input, if_defined(call.weight), if_defined(call.bias), call, ranks_);
  }

 private:
  /// Returns the momentum. Without one, running statistics are an average over all batches.
  double momentum() const {
    const auto given = layer_.options.momentum();
    return given                                  ? *given
           : layer_.num_batches_tracked.defined() ? 1 / layer_.num_batches_tracked.template item<double>()
                                                  : 0;
  }

  const Layer& layer_;
  SyncRanksPtr ranks_;
  at::Tensor input_;  // of the running call
};

/// Marks a converted layer.
struct Synced {};

/// Wraps forward itself, where parameters are available whether the layer became a unit before or becomes one later.
template <class Layer>
void convert(const Layer& layer, HookPoint& point, const SyncRanksPtr& ranks) {
  const auto synced = std::make_shared<SyncedLayer<Layer>>(layer, ranks);
  point.register_forward_pre_hook([synced](HookPoint& at, TensorRefs inputs) { synced->before(at, inputs); });
  point.register_forward_hook([synced](HookPoint&, TensorRefs outputs) { synced->after(outputs); }, HookOrder::Prepend);
}

/// Calls `visit` with the layer if `module` is a batch norm, and returns whether it is.
template <class Visit>
bool visit_batch_norm(torch::nn::Module& module, const Visit& visit) {
  const auto visit_if = [&](auto* layer) {
    if (layer) {
      visit(*layer);
    }
    return layer != nullptr;
  };
  return visit_if(module.as<torch::nn::BatchNorm1dImpl>()) || visit_if(module.as<torch::nn::BatchNorm2dImpl>()) ||
         visit_if(module.as<torch::nn::BatchNorm3dImpl>());
}

struct NamedLayer {
  std::string path;
  HookPoint* point;
};

/// Adds the layer once if it is a batch norm; it may be registered in several places.
void add_batch_norm(const std::string& path, torch::nn::Module& module, std::vector<NamedLayer>& layers) {
  if (!visit_batch_norm(module, [](const auto&) {})) {
    return;
  }
  auto* point = &hook_point(module, fmt::format("convert_sync_batchnorm: '{}'", path));
  TESSERA_CHECK(StateError, !point->find<Synced>(),
                "convert_sync_batchnorm: '{}' takes its statistics over several ranks already; call it once", path);
  if (std::ranges::find(layers, point, &NamedLayer::point) == layers.end()) {
    layers.push_back({path, point});
  }
}

std::vector<NamedLayer> batch_norms(torch::nn::Module& module) {
  std::vector<NamedLayer> layers;
  add_batch_norm("", module, layers);
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    add_batch_norm(item.key(), *item.value(), layers);
  }
  return layers;
}

}  // namespace

void convert_sync_batchnorm(ModuleRef module, const DeviceMesh& mesh) {
  for (const auto& [path, point] : batch_norms(*module)) {
    const auto ranks = c10::make_intrusive<SyncRanks>(mesh, fmt::format("batch norm '{}'", path));
    if (!ranks->axes.empty()) {
      point->attach(std::make_shared<Synced>());
      visit_batch_norm(point->module(), [&, &at = *point](const auto& layer) { convert(layer, at, ranks); });
    }
  }
}

}  // namespace tessera
