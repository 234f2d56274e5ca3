#pragma once
// Forwards of torch::nn's layers as PyTorch's Python has them, where libtorch's C++ takes apart what is one op there
// and so rounds twice. A hook point calls them in place of the layer's own.

#include <ATen/core/Tensor.h>

#include <type_traits>

#include "nn/hooks/forward_signature.h"

namespace torch::nn {
class LinearImpl;
}

namespace tessera::detail {

template <class Member>
struct ClassOfMember;
template <class Function, class C>
struct ClassOfMember<Function C::*> {
  using type = C;
};

/// Whether the forward of Impl is torch::nn::Linear's, itself or inherited.
template <class Impl>
inline constexpr bool has_python_forward = false;
template <HasOneForward Impl>
inline constexpr bool has_python_forward<Impl> =
    std::is_same_v<typename ClassOfMember<decltype(&Impl::forward)>::type, torch::nn::LinearImpl>;

/// at::linear, in one op. torch::nn's adds the bias to a product that is rounded already, where the input has not two
/// dims.
at::Tensor python_forward(const torch::nn::LinearImpl& linear, const at::Tensor& input);

}  // namespace tessera::detail
