#include "nn/hooks/clone.h"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <c10/util/Type.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "nn/hooks/clone_memo.h"
#include "nn/hooks/hook_point.h"

namespace tessera {
namespace {

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

// Restores the states of the default generators of the CPU and of the module's devices.
class GeneratorGuard {
 public:
  explicit GeneratorGuard(const torch::nn::Module& module) {
    std::vector<at::Device> devices{at::Device(at::kCPU)};
    for (const auto& parameter : module.parameters()) {
      const at::Device device = parameter.device();
      if (device.is_cuda() && std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
    }
    for (const at::Device& device : devices) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      at::Tensor state = generator.get_state();
      states_.emplace_back(std::move(generator), std::move(state));
    }
  }
  ~GeneratorGuard() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }
  GeneratorGuard(const GeneratorGuard&) = delete;
  GeneratorGuard& operator=(const GeneratorGuard&) = delete;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Removes the given weights from the options of a module's embeddings while it lives. Otherwise reset() would use them
/// as the parameter, which the copy would share with the source.
class GivenWeightsGuard {
 public:
  explicit GivenWeightsGuard(const torch::nn::Module& module) {
    take_from(module);
    for (const auto& each : module.modules(/*include_self=*/false)) take_from(*each);
  }
  ~GivenWeightsGuard() {
    for (const auto& [slot, weight] : taken_) *slot = weight;
  }
  GivenWeightsGuard(const GivenWeightsGuard&) = delete;
  GivenWeightsGuard& operator=(const GivenWeightsGuard&) = delete;

 private:
  void take_from(const torch::nn::Module& module) {
    auto& each = const_cast<torch::nn::Module&>(module);  // restored at the end
    if (auto* const embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&each)) take(embedding->options._weight());
    if (auto* const bag = dynamic_cast<torch::nn::EmbeddingBagImpl*>(&each)) take(bag->options._weight());
  }
  void take(at::Tensor& slot) {
    if (slot.defined()) taken_.emplace_back(&slot, std::exchange(slot, at::Tensor()));
  }

  std::vector<std::pair<at::Tensor*, at::Tensor>> taken_;
};

void check_all_cloneable(const torch::nn::Module& module) {
  const auto check = [](const torch::nn::Module& each) {
    if (const HookPoint* point = find_hook_point(each)) point->check_cloneable();
  };
  check(module);
  for (const auto& child : module.modules(/*include_self=*/false)) check(*child);
}

torch::nn::Module& submodule(torch::nn::Module& root, const std::string& path) {
  torch::nn::Module* module = &root;
  std::shared_ptr<torch::nn::Module> owner;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const auto children = module->named_children();
    const auto* child = children.find(path.substr(begin, end - begin));
    TESSERA_ASSERT(child != nullptr, "the clone has no module {}", path);
    owner = *child;
    module = owner.get();
    begin = end + 1;
  }
  return *module;
}

void tie_in_copy(torch::nn::Module& copy, const std::string& name, const std::string& first, const at::Tensor& tensor) {
  const size_t dot = name.rfind('.');
  const std::string path = dot == std::string::npos ? "" : name.substr(0, dot);
  torch::nn::Module& owner = submodule(copy, path);
  HookPoint* const point = find_hook_point(owner);
  const bool tied =
      point != nullptr && point->rebind_parameter(dot == std::string::npos ? name : name.substr(dot + 1), tensor);
  TESSERA_CHECK(NotImplementedError, tied,
                "clone: {} and {} are one tensor, but in the copy they would be two, because {} has no {}. Use a "
                "tessera::nn layer (or TESSERA_MODULE) whose member has the parameter's name",
                first, name, c10::demangle(typeid(owner).name()),
                point == nullptr ? "hook point" : "member of the parameter's name");
}

void restore_parameter_ties(const torch::nn::Module& source, torch::nn::Module& copy) {
  const NamedTensors copies = copy.named_parameters();
  std::unordered_map<const at::TensorImpl*, std::string> first_names;
  for (const auto& item : source.named_parameters()) {
    const auto [entry, is_first] = first_names.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
    if (is_first) continue;
    const at::Tensor& tensor = copies[entry->second];
    if (!copies[item.key()].is_same(tensor)) tie_in_copy(copy, item.key(), entry->second, tensor);
  }
}

/// Restores requires_grad, because Cloneable::clone recreates parameters, all of which then require gradients.
void restore_requires_grad(const torch::nn::Module& source, const torch::nn::Module& copy) {
  const NamedTensors copies = copy.named_parameters();
  for (const auto& item : source.named_parameters()) copies[item.key()].set_requires_grad(item.value().requires_grad());
}

void check_buffer_ties(const torch::nn::Module& source, const torch::nn::Module& copy) {
  const NamedTensors copies = copy.named_buffers();
  std::unordered_map<const at::TensorImpl*, std::string> first_names;
  for (const auto& item : source.named_buffers()) {
    const auto [entry, is_first] = first_names.try_emplace(item.value().unsafeGetTensorImpl(), item.key());
    TESSERA_CHECK(NotImplementedError, is_first || copies[item.key()].is_same(copies[entry->second]),
                  "clone: the buffers {} and {} are one tensor, but in the copy they would be two; register the buffer "
                  "in one module only",
                  entry->second, item.key());
  }
}

}  // namespace

std::shared_ptr<torch::nn::Module> detail::clone_checked(
    const torch::nn::Module& source, const std::function<std::shared_ptr<torch::nn::Module>()>& clone) {
  check_all_cloneable(source);
  const CloneMemo memo;
  const GeneratorGuard generators(source);
  const GivenWeightsGuard given_weights(source);
  auto copy = clone();
  restore_parameter_ties(source, *copy);
  restore_requires_grad(source, *copy);
  check_buffer_ties(source, *copy);
  return copy;
}

std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module,
                                                const std::optional<at::Device>& device) {
  return detail::clone_checked(module, [&] { return module.clone(device); });
}

void tie_parameter(torch::nn::Module& module, std::string_view name, const at::Tensor& tensor) {
  HookPoint& point = hook_point(module, "tie_parameter");
  const NamedTensors parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const present = parameters.find(std::string(name));
  TESSERA_CHECK(KeyError, present != nullptr, "tie_parameter: {} has no parameter {}", point.type_name(), name);
  TESSERA_CHECK(
      ValueError, tensor.defined() && tensor.sizes() == present->sizes(),
      "tie_parameter: the parameter {} of {} has sizes {}, and the given tensor {}; only tensors of equal sizes "
      "can be one",
      name, point.type_name(), c10::str(present->sizes()),
      tensor.defined() ? c10::str(tensor.sizes()) : "is undefined");
  TESSERA_CHECK(KeyError, point.rebind_parameter(name, tensor),
                "tie_parameter: {} has no member {} that could be tied; give it a member of the parameter's name or a "
                "function `at::Tensor* parameter_member(std::string_view name)`",
                point.type_name(), name);
}

}  // namespace tessera
