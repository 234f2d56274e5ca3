#pragma once
// Forwards of torch::nn's layers as PyTorch's Python has them, where libtorch's C++ has others. A hook point calls them
// in place of the layer's own.
//
// Linear is one op, at::linear: libtorch's adds the bias to a product that is rounded already, where the input has not
// two dims. Attention uses at::scaled_dot_product_attention unless its weights are wanted, and takes masks of bool, of
// float in every dtype, and one a head; libtorch's adds the ones of a bool mask to the scores, and has no mask of keys
// in bfloat16 and float16.

#include <ATen/core/Tensor.h>

#include <tuple>
#include <type_traits>

#include "nn/hooks/forward_signature.h"

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

/// Whether the forward of Impl is that of one of these layers, itself or inherited.
template <class Impl>
inline constexpr bool has_python_forward = false;
template <HasOneForward Impl>
inline constexpr bool has_python_forward<Impl> =
    is_any_of<typename ClassOfMember<decltype(&Impl::forward)>::type, torch::nn::LinearImpl,
              torch::nn::MultiheadAttentionImpl, torch::nn::TransformerDecoderLayerImpl,
              torch::nn::TransformerEncoderLayerImpl>;

at::Tensor python_forward(torch::nn::LinearImpl& layer, const at::Tensor& input);

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
