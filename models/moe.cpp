#include "models/moe.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fused/gelu.h"
#include "fused/glu.h"
#include "nn/hooks/inference_linear.h"

namespace tessera::models {

namespace {

/// Returns this rank's part. If the parameter is replicated, the gradient is a term of a sum.
at::Tensor own_part(const at::Tensor& parameter) {
  if (!is_dtensor(parameter)) {
    return parameter;
  }
  auto terms = placements(parameter);
  for (auto& placement : terms) {
    placement = placement.is_replicate() ? Placement(Partial()) : placement;
  }
  return to_local(parameter, terms);
}

void reset_as_linear(const at::Tensor& weight) {
  const c10::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(weight.size(-1)));
  weight.uniform_(-bound, bound);
}

/// Returns logits of all tokens on every rank. With replicated tokens, each rank computes and differentiates all of
/// them.
at::Tensor logits_of_all(const at::Tensor& logits, const at::Tensor& x, bool is_whole) {
  if (is_whole) {
    const auto ranks = static_cast<double>(device_mesh(x).size());
    return logits.detach() + (logits - logits.detach()) / ranks;
  }
  auto shape = x.sizes().vec();
  shape.back() = logits.size(-1);
  return full_tensor(from_local(logits, device_mesh(x), placements(x), {.shape = shape}));
}

}  // namespace

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::Gelu:
      return at::gelu(x);
    case Activation::TanhGelu:
      return tanh_gelu(x);
    case Activation::Relu:
      return at::relu(x);
    case Activation::Silu:
      break;
  }
  return at::silu(x);
}

at::Tensor activate_gate(const at::Tensor& gate, const at::Tensor& up, Activation activation) {
  switch (activation) {
    case Activation::Silu:
      return swiglu(gate, up);
    case Activation::TanhGelu:
      return tanh_geglu(gate, up);
    case Activation::Gelu:
    case Activation::Relu:
      break;
  }
  return activate(gate, activation) * up;
}

RouterImpl::RouterImpl(const DecoderConfig& config) {
  weight = register_parameter("weight", at::empty({config.moe->num_experts, config.hidden_size}));
  RouterImpl::reset_parameters();
}

void RouterImpl::reset_parameters() {
  reset_as_linear(weight);
}

at::Tensor RouterImpl::forward(const at::Tensor& tokens) {
  return at::linear(tokens, own_part(weight));
}

ExpertsImpl::ExpertsImpl(const DecoderConfig& config) : activation(config.activation) {
  const int64_t experts = config.moe->num_experts, dim = config.hidden_size, inner = config.moe->intermediate_size;
  gate_proj = register_parameter("gate_proj", at::empty({experts, inner, dim}));
  up_proj = register_parameter("up_proj", at::empty({experts, inner, dim}));
  down_proj = register_parameter("down_proj", at::empty({experts, dim, inner}));
  ExpertsImpl::reset_parameters();
}

void ExpertsImpl::reset_parameters() {
  for (const auto& weight : {gate_proj, up_proj, down_proj}) {
    reset_as_linear(weight);
  }
}

at::Tensor ExpertsImpl::forward(at::Tensor tokens, at::Tensor counts) {
  const auto gates = own_part(gate_proj).unbind(0), ups = own_part(up_proj).unbind(0),
             downs = own_part(down_proj).unbind(0);
  counts = counts.to(at::kCPU, at::kLong);
  const auto groups = tokens.split_with_sizes({counts.const_data_ptr<int64_t>(), gates.size()});
  std::vector<at::Tensor> results;
  for (size_t expert = 0; expert < gates.size(); ++expert) {
    if (const auto& group = groups[expert]; group.size(0) > 0) {
      const auto gate = detail::inference_linear(group, gates[expert], {});
      const auto up = detail::inference_linear(group, ups[expert], {});
      results.push_back(detail::inference_linear(activate_gate(gate, up, activation), downs[expert], {}));
    }
  }
  return results.empty() ? at::zeros_like(tokens) : at::cat(results);
}

MoeImpl::MoeImpl(const DecoderConfig& config) : config(*config.moe) {
  router = register_module("router", Router(config));
  experts = register_module("experts", Experts(config));
}

at::Tensor MoeImpl::forward(at::Tensor x) {
  const bool is_placed = is_dtensor(x);
  const bool is_whole = is_placed && placements(x)[0].is_replicate();
  const Placements placed = is_whole ? Placements{Partial()} : is_placed ? placements(x) : Placements();
  const auto own = is_placed ? to_local(x, placed) : x;
  const auto logits = router(own);
  if (config.output_router_logits) {
    router_logits = (is_placed ? logits_of_all(logits, x, is_whole) : logits).flatten(0, -2);
  }
  const auto mixed = mix(own.flatten(0, -2), logits.flatten(0, -2)).view_as(own);
  return is_placed ? from_local(mixed, device_mesh(x), placed, {.shape = x.sizes().vec()}) : mixed;
}

at::Tensor MoeImpl::mix(const at::Tensor& tokens, const at::Tensor& logits) {
  const int64_t count = tokens.size(0), per_token = config.num_experts_per_tok;
  auto [weights, chosen] = logits.softmax(-1, at::kFloat).topk(per_token, -1);
  if (config.norm_topk_prob) {
    weights = weights / weights.sum(-1, /*keepdim=*/true);
  }
  chosen = chosen.flatten();
  const auto order = chosen.argsort(/*stable=*/true, 0, /*descending=*/false);  // by expert
  const auto counts = at::bincount(chosen, {}, config.num_experts);
  const auto results = experts(tokens.index_select(0, order.div(per_token, "floor")), counts);
  const auto by_token = results.index_select(0, order.argsort()).view({count, per_token, results.size(1)});
  return (by_token * weights.to(by_token.scalar_type()).unsqueeze(-1)).sum(1);
}

at::Tensor load_balancing_loss(const std::vector<at::Tensor>& router_logits, int64_t num_experts_per_tok) {
  const auto probabilities = at::cat(router_logits).to(at::kFloat).softmax(-1);
  const int64_t count = probabilities.size(0), experts = probabilities.size(1);
  const auto chosen = std::get<1>(probabilities.detach().topk(num_experts_per_tok, -1)).flatten();
  const auto share = at::bincount(chosen, {}, experts).to(at::kFloat) / static_cast<double>(count);
  return (share * probabilities.mean(0)).sum() * static_cast<double>(experts);
}

}  // namespace tessera::models
