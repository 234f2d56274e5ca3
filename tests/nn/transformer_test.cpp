// The layers of an encoder, a decoder and a transformer have hook points.

#include "nn/transformer.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <torch/utils.h>

#include <map>

#include "nn/normalization.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

constexpr uint64_t kInitSeed = 11;
constexpr int64_t kLayers = 3;

torch::nn::TransformerEncoderOptions encoder_options() {
  return torch::nn::TransformerEncoderOptions(
             torch::nn::TransformerEncoderLayer(torch::nn::TransformerEncoderLayerOptions(4, 2).dropout(0)), kLayers)
      .norm(torch::nn::AnyModule(nn::LayerNorm(torch::nn::LayerNormOptions({4}))));
}

torch::nn::TransformerDecoderOptions decoder_options() {
  return {torch::nn::TransformerDecoderLayer(torch::nn::TransformerDecoderLayerOptions(4, 2).dropout(0)), kLayers};
}

torch::nn::TransformerOptions transformer_options() {
  return torch::nn::TransformerOptions(4, 2, kLayers, kLayers).dim_feedforward(8).dropout(0);
}

at::Tensor tokens(uint64_t seed, int64_t length) {
  torch::manual_seed(seed);
  return at::randn({length, 2, 4});
}

using Calls = std::map<const torch::nn::Module*, int>;

/// Counts the forwards of each layer of a list.
void count_forwards(const torch::nn::ModuleList& layers, Calls& calls) {
  for (const auto& layer : *layers) {
    hook_point(*layer, "test").register_forward_hook([&calls](HookPoint& point, TensorRefs) {
      ++calls[&point.module()];
    });
  }
}

void check_one_forward_each(const torch::nn::ModuleList& layers, const Calls& calls) {
  CHECK(layers->size() == kLayers);
  for (const auto& layer : *layers) {
    CHECK(calls.at(layer.get()) == 1);
  }
}

template <class A, class B>
void check_same_parameters(const A& a, const B& b) {
  const auto left = a->named_parameters(), right = b->named_parameters();
  REQUIRE(left.keys() == right.keys());
  for (const auto& item : left) {
    CHECK(item.value().equal(right[item.key()]));
  }
}

TEST_CASE("each layer of an encoder runs its hooks, and the results are those of a stock one but for rounding",
          "[nn]") {
  torch::manual_seed(kInitSeed);
  torch::nn::TransformerEncoder stock(encoder_options());
  torch::manual_seed(kInitSeed);
  nn::TransformerEncoder encoder(encoder_options());
  check_same_parameters(stock, encoder);
  Calls calls;
  count_forwards(encoder->layers, calls);
  const auto mask = torch::nn::TransformerImpl::generate_square_subsequent_mask(5);
  CHECK(encoder(tokens(1, 5), mask).allclose(stock(tokens(1, 5), mask), 1e-5, 1e-6));
  check_one_forward_each(encoder->layers, calls);
  CHECK(nn::TransformerEncoder(torch::nn::TransformerEncoderLayer(4, 2), 2)->layers->size() == 2);
}

TEST_CASE("each layer of a decoder runs its hooks, and the results are those of a stock one but for rounding", "[nn]") {
  torch::manual_seed(kInitSeed);
  torch::nn::TransformerDecoder stock(decoder_options());
  torch::manual_seed(kInitSeed);
  nn::TransformerDecoder decoder(decoder_options());
  check_same_parameters(stock, decoder);
  Calls calls;
  count_forwards(decoder->layers, calls);
  const auto mask = torch::nn::TransformerImpl::generate_square_subsequent_mask(5);
  CHECK(decoder(tokens(1, 5), tokens(2, 3), mask).allclose(stock(tokens(1, 5), tokens(2, 3), mask), 1e-5, 1e-6));
  check_one_forward_each(decoder->layers, calls);
  CHECK(nn::TransformerDecoder(torch::nn::TransformerDecoderLayer(4, 2), 2)->layers->size() == 2);
}

TEST_CASE("the layers of a transformer's own encoder and decoder have hook points", "[nn]") {
  torch::manual_seed(kInitSeed);
  torch::nn::Transformer stock(transformer_options());
  torch::manual_seed(kInitSeed);
  nn::Transformer transformer(transformer_options());
  check_same_parameters(stock, transformer);
  const auto encoder_layers = transformer->encoder.get<nn::TransformerEncoder::Impl>().layers;
  const auto decoder_layers = transformer->decoder.get<nn::TransformerDecoder::Impl>().layers;
  Calls calls;
  count_forwards(encoder_layers, calls);
  count_forwards(decoder_layers, calls);
  CHECK(transformer(tokens(1, 5), tokens(2, 3)).allclose(stock(tokens(1, 5), tokens(2, 3)), 1e-5, 1e-6));
  check_one_forward_each(encoder_layers, calls);
  check_one_forward_each(decoder_layers, calls);
}

TEST_CASE("a transformer keeps an encoder of one's own", "[nn]") {
  nn::TransformerEncoder own(encoder_options());
  nn::Transformer transformer(transformer_options().custom_encoder(torch::nn::AnyModule(own)));
  CHECK(transformer->encoder.get<nn::TransformerEncoder::Impl>().norm.ptr() != nullptr);
}

TEST_CASE("from a stock one: the parameters are shared, and the stock one's layers stay what they were", "[nn]") {
  torch::nn::TransformerEncoder stock(encoder_options());
  const auto layer = stock->layers->ptr(0);
  nn::TransformerEncoder encoder(*stock);
  CHECK(stock->layers->ptr(0) == layer);
  CHECK(find_hook_point(*layer) == nullptr);
  for (const auto& item : encoder->named_parameters()) {
    CHECK(item.value().is_same(stock->named_parameters()[item.key()]));
  }
  CHECK(encoder(tokens(1, 5)).allclose(stock(tokens(1, 5)), 1e-5, 1e-6));
}

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall): as libtorch's modules
  void reset() override {
    encoder = register_module("encoder", nn::TransformerEncoder(encoder_options()));
    transformer = register_module("transformer", nn::Transformer(transformer_options()));
  }
  at::Tensor forward(const at::Tensor& x) { return transformer(encoder(x), x); }

  nn::TransformerEncoder encoder{nullptr};
  nn::Transformer transformer{nullptr};
};
TESSERA_MODULE(Net);

TEST_CASE("clones, by themselves and within a module, have layers of their own with hook points", "[nn]") {
  Net net;
  const auto copy = std::dynamic_pointer_cast<Net::Impl>(net->clone());
  REQUIRE(copy != nullptr);
  check_same_parameters(net, copy);
  Calls calls;
  count_forwards(copy->encoder->layers, calls);
  count_forwards(copy->transformer->encoder.get<nn::TransformerEncoder::Impl>().layers, calls);
  count_forwards(copy->transformer->decoder.get<nn::TransformerDecoder::Impl>().layers, calls);
  CHECK(copy->forward(tokens(1, 5)).equal(net(tokens(1, 5))));
  CHECK(calls.size() == 3 * kLayers);
  {
    const torch::NoGradGuard no_grad;
    for (auto& param : copy->parameters()) {
      param.add_(1);
    }
  }
  CHECK_FALSE(copy->forward(tokens(1, 5)).equal(net(tokens(1, 5))));
  CHECK(std::dynamic_pointer_cast<nn::TransformerDecoder::Impl>(nn::TransformerDecoder(decoder_options())->clone()));
}

TEST_CASE("a layer of another type is refused", "[nn]") {
  nn::TransformerEncoder encoder(encoder_options());
  encoder->layers->push_back(torch::nn::TransformerEncoderLayer(4, 2));
  CHECK_THROWS_WITH(encoder(tokens(1, 5)),
                    "tessera::nn::TransformerEncoder: its `layers` hold a torch::nn::TransformerEncoderLayerImpl; put "
                    "tessera::nn::TransformerEncoderLayers there");
}

}  // namespace

}  // namespace tessera
