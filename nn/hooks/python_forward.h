#pragma once
// Forwards of layers as in PyTorch's Python, where libtorch's C++ differs. Hook points call them instead of the layer's
// own.
//
// - Linear is one op, at::linear. libtorch adds the bias to an already rounded product unless the input has two dims.
// - Attention uses at::scaled_dot_product_attention unless its weights are requested. It accepts masks of bool and of
//   any floating dtype, and one per head. libtorch adds the ones of a bool mask to the scores, and refuses key masks in
//   bfloat16 and float16.

#include <ATen/core/Tensor.h>

#include <tuple>
#include <type_traits>

#include "nn/hooks/forward_signature.h"
#include "nn/hooks/linear_adapter.h"

namespace torch::nn {
class LinearImpl;
class MultiheadAttentionImpl;
class TransformerDecoderLayerImpl;
class TransformerEncoderLayerImpl;
}  // namespace torch::nn

namespace tessera::detail {

template <class Member>
struct ClassOfMember;
template <class Function, class C>
struct ClassOfMember<Function C::*> {
  using type = C;
};

template <class Type, class... Types>
inline constexpr bool is_any_of = (std::is_same_v<Type, Types> || ...);

/// True if the forward of Impl is that of one of these layers, own or inherited.
template <class Impl>
inline constexpr bool has_python_forward = false;
template <HasOneForward Impl>
inline constexpr bool has_python_forward<Impl> =
    is_any_of<typename ClassOfMember<decltype(&Impl::forward)>::type, torch::nn::LinearImpl,
              torch::nn::MultiheadAttentionImpl, torch::nn::TransformerDecoderLayerImpl,
              torch::nn::TransformerEncoderLayerImpl>;

/// True if the forward of Impl is Linear's, which takes a LinearAdapter.
template <class Impl>
inline constexpr bool has_linear_forward = false;
template <HasOneForward Impl>
inline constexpr bool has_linear_forward<Impl> =
    std::is_same_v<typename ClassOfMember<decltype(&Impl::forward)>::type, torch::nn::LinearImpl>;

/// `adapter` may be null.
at::Tensor python_forward(torch::nn::LinearImpl& layer, const at::Tensor& input,
                          const LinearAdapter* adapter = nullptr);

/// Throws ValueError for inputs and masks of other sizes or dtypes than torch.nn.MultiheadAttention takes.
std::tuple<at::Tensor, at::Tensor> python_forward(torch::nn::MultiheadAttentionImpl& layer, const at::Tensor& query,
                                                  const at::Tensor& key, const at::Tensor& value,
                                                  const at::Tensor& key_padding_mask = {}, bool need_weights = true,
                                                  const at::Tensor& attn_mask = {}, bool average_attn_weights = true);

at::Tensor python_forward(torch::nn::TransformerEncoderLayerImpl& layer, const at::Tensor& src,
                          const at::Tensor& src_mask = {}, const at::Tensor& src_key_padding_mask = {});

at::Tensor python_forward(torch::nn::TransformerDecoderLayerImpl& layer, const at::Tensor& tgt,
                          const at::Tensor& memory, const at::Tensor& tgt_mask = {}, const at::Tensor& memory_mask = {},
                          const at::Tensor& tgt_key_padding_mask = {}, const at::Tensor& memory_key_padding_mask = {});

}  // namespace tessera::detail
