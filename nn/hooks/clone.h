#pragma once
// A deep copy of a module that keeps tied parameters tied.
//
// torch::nn::Cloneable::clone builds the copy with reset(), so it draws random numbers, and it copies child by
// child, so two layers that share a weight get one each. clone_module repairs both:
//
//   tessera::nn::Embedding wte(256, 64); tessera::nn::Linear head(LinearOptions(64, 256).bias(false));
//   tie_parameter(*head, "weight", wte->weight);            // one tensor for the member and the registry
//   auto copy = clone_module(*model);                       // again one tensor, another one than the model's
//
// `Hooked::clone` does the same; use clone_module where the outermost module is a stock one.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

namespace tessera {

/// Deep copy of `module`, on `device` if one is given. The default generators end in the state in which they
/// started; no other thread may draw from them meanwhile.
/// Errors: NotImplementedError if hooks or state are attached anywhere in the module, if a type in it has no clone,
/// or if a tie cannot be carried over because a module that shares the tensor has no hook point or no member of the
/// parameter's name.
std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module,
                                                const std::optional<at::Device>& device = std::nullopt);

/// Makes `tensor` the parameter `name` of a hooked module: the registry entry and the member of that name.
/// Errors: StateError without a hook point, KeyError if the module has no such parameter or member,
/// ValueError if the sizes differ.
void tie_parameter(torch::nn::Module& module, std::string_view name, const at::Tensor& tensor);

namespace detail {
/// Runs `clone` on `source` between the checks and the repairs that clone_module promises.
std::shared_ptr<torch::nn::Module> clone_checked(const torch::nn::Module& source,
                                                 const std::function<std::shared_ptr<torch::nn::Module>()>& clone);
}  // namespace detail

}  // namespace tessera
