#pragma once
// Deep copies of modules in which tied parameters stay tied.
//
//   tie_parameter(*head, "weight", wte->weight);  // one tensor in the member and in the registry
//   auto copy = clone_module(*model);             // one tensor again, other than the model's
//
// torch::nn::Cloneable::clone copies child by child, so that layers that share a weight get one each, and draws random
// numbers, because it calls reset(). Hooked::clone works like clone_module, which is for outermost modules that are
// stock.

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

namespace tessera {

/// Returns a deep copy, on `device` if given. Leaves default generators as they were; no other thread may draw from
/// them meanwhile. Throws NotImplementedError:
/// - if a module has hooks or attached state, or a hooked type has no clone;
/// - for a tied parameter, if a module that shares it has no hook point or no member of its name;
/// - for a buffer that two modules share.
std::shared_ptr<torch::nn::Module> clone_module(const torch::nn::Module& module,
                                                const std::optional<at::Device>& device = std::nullopt);

/// Makes `tensor` the parameter `name` of a hooked module, in its registry and in the member of that name. Throws:
/// - StateError if the module has no hook point.
/// - KeyError if it has no such parameter or member.
/// - ValueError if the sizes differ or `tensor` is undefined.
void tie_parameter(torch::nn::Module& module, std::string_view name, const at::Tensor& tensor);

namespace detail {
/// Runs `clone` on `source` with the checks and repairs of clone_module.
std::shared_ptr<torch::nn::Module> clone_checked(const torch::nn::Module& source,
                                                 const std::function<std::shared_ptr<torch::nn::Module>()>& clone);
}  // namespace detail

}  // namespace tessera
