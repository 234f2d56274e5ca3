#include "nn/transformer.h"

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>

#include <typeinfo>
#include <utility>

namespace tessera::nn {

namespace {

/// Replaces stock layers by layers with hook points that share their parameters. The list may belong to another module,
/// which keeps it.
template <class StockImpl>
torch::nn::ModuleList hooked_layers(const torch::nn::ModuleList& stock) {
  torch::nn::ModuleList layers;
  for (const auto& module : *stock) {
    auto layer = std::dynamic_pointer_cast<StockImpl>(module);
    TESSERA_ASSERT(layer != nullptr, "a layer of type {}", module_type_name(*module));
    layers->push_back(find_hook_point(*layer) != nullptr ? module : hooked(layer).ptr());
  }
  return layers;
}

template <class Layer>
typename Layer::Impl& cast_layer(const std::shared_ptr<torch::nn::Module>& module, const char* type) {
  auto* const layer = dynamic_cast<typename Layer::Impl*>(module.get());
  TESSERA_CHECK(ValueError, layer != nullptr,
                "tessera::nn::{0}: its `layers` hold a {1}; put tessera::nn::{0}Layers there", type,
                module_type_name(*module));
  return *layer;
}

/// Returns a copy, with this type, of the result of a stock clone.
template <class Impl, class StockImpl>
std::shared_ptr<torch::nn::Module> as_own(const std::shared_ptr<torch::nn::Module>& stock) {
  return std::make_shared<Impl>(dynamic_cast<const StockImpl&>(*stock));
}

/// Returns whether it holds exactly this type, rather than a derived one.
template <class StockImpl>
bool holds(const torch::nn::AnyModule& any) {
  return !any.is_empty() && any.type_info() == typeid(StockImpl);
}

}  // namespace

TransformerEncoderImpl::TransformerEncoderImpl(torch::nn::TransformerEncoderLayer layer, int64_t num_layers)
    : TransformerEncoderImpl(TransformerEncoderOptions(std::move(layer), num_layers)) {}

TransformerEncoderImpl::TransformerEncoderImpl(TransformerEncoderOptions options)
    : TransformerEncoderImpl(torch::nn::TransformerEncoderImpl(std::move(options))) {}

TransformerEncoderImpl::TransformerEncoderImpl(const torch::nn::TransformerEncoderImpl& stock)
    : torch::nn::TransformerEncoderImpl(stock) {
  hook_layers();
}

void TransformerEncoderImpl::hook_layers() {
  layers = replace_module("layers", hooked_layers<torch::nn::TransformerEncoderLayerImpl>(layers));
}

void TransformerEncoderImpl::reset() {
  torch::nn::TransformerEncoderImpl::reset();
  hook_layers();
}

std::shared_ptr<torch::nn::Module> TransformerEncoderImpl::clone(const std::optional<at::Device>& device) const {
  return as_own<TransformerEncoderImpl, torch::nn::TransformerEncoderImpl>(
      torch::nn::TransformerEncoderImpl::clone(device));
}

at::Tensor TransformerEncoderImpl::forward(const at::Tensor& src, const at::Tensor& src_mask,
                                           const at::Tensor& src_key_padding_mask) {
  at::Tensor output = src;
  for (const auto& layer : *layers) {
    output = cast_layer<TransformerEncoderLayer>(layer, "TransformerEncoder")
                 .forward(output, src_mask, src_key_padding_mask);
  }
  return norm.is_empty() ? output : norm.forward(output);
}

TransformerDecoderImpl::TransformerDecoderImpl(torch::nn::TransformerDecoderLayer layer, int64_t num_layers)
    : TransformerDecoderImpl(TransformerDecoderOptions(std::move(layer), num_layers)) {}

TransformerDecoderImpl::TransformerDecoderImpl(TransformerDecoderOptions options)
    : TransformerDecoderImpl(torch::nn::TransformerDecoderImpl(std::move(options))) {}

TransformerDecoderImpl::TransformerDecoderImpl(const torch::nn::TransformerDecoderImpl& stock)
    : torch::nn::TransformerDecoderImpl(stock) {
  hook_layers();
}

void TransformerDecoderImpl::hook_layers() {
  layers = replace_module("layers", hooked_layers<torch::nn::TransformerDecoderLayerImpl>(layers));
}

void TransformerDecoderImpl::reset() {
  torch::nn::TransformerDecoderImpl::reset();
  hook_layers();
}

std::shared_ptr<torch::nn::Module> TransformerDecoderImpl::clone(const std::optional<at::Device>& device) const {
  return as_own<TransformerDecoderImpl, torch::nn::TransformerDecoderImpl>(
      torch::nn::TransformerDecoderImpl::clone(device));
}

at::Tensor TransformerDecoderImpl::forward(const at::Tensor& tgt, const at::Tensor& memory, const at::Tensor& tgt_mask,
                                           const at::Tensor& memory_mask, const at::Tensor& tgt_key_padding_mask,
                                           const at::Tensor& memory_key_padding_mask) {
  at::Tensor output = tgt;
  for (const auto& layer : *layers) {
    output = cast_layer<TransformerDecoderLayer>(layer, "TransformerDecoder")
                 .forward(output, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask);
  }
  return norm.is_empty() ? output : norm.forward(output);
}

TransformerImpl::TransformerImpl(int64_t d_model, int64_t nhead)
    : TransformerImpl(TransformerOptions(d_model, nhead)) {}

TransformerImpl::TransformerImpl(TransformerOptions options)
    : TransformerImpl(torch::nn::TransformerImpl(std::move(options))) {}

TransformerImpl::TransformerImpl(const torch::nn::TransformerImpl& stock) : torch::nn::TransformerImpl(stock) {
  hook_coders();
}

void TransformerImpl::hook_coders() {
  if (holds<torch::nn::TransformerEncoderImpl>(encoder)) {
    const TransformerEncoder own(encoder.get<torch::nn::TransformerEncoderImpl>());
    encoder = torch::nn::AnyModule(replace_module("encoder", own));
  }
  if (holds<torch::nn::TransformerDecoderImpl>(decoder)) {
    const TransformerDecoder own(decoder.get<torch::nn::TransformerDecoderImpl>());
    decoder = torch::nn::AnyModule(replace_module("decoder", own));
  }
}

void TransformerImpl::reset() {
  torch::nn::TransformerImpl::reset();
  hook_coders();
}

std::shared_ptr<torch::nn::Module> TransformerImpl::clone(const std::optional<at::Device>& device) const {
  return as_own<TransformerImpl, torch::nn::TransformerImpl>(torch::nn::TransformerImpl::clone(device));
}

}  // namespace tessera::nn
