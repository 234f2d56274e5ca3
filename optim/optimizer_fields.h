#pragma once
// Visits the state and options of libtorch's optimizers by field name.
//
//   with_types(optimizer, "save", [&]<class Types>(Types) {
//     auto& state = static_cast<Types::State&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
//     visit_fields(state, [&](const char* name, auto& field) { ... });  // "exp_avg", at::Tensor&; "step", int64_t&
//   });
//
// Thread safety: no synchronization.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <tuple>
#include <type_traits>

#include "base/error.h"

namespace tessera {

// Calls `visit(name, field)` for every field: at::Tensor&, int64_t&, double& or bool&.

template <class Visit>
void visit_fields(torch::optim::AdamParamState& state, Visit visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visit>
void visit_fields(torch::optim::AdamWParamState& state, Visit visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visit>
void visit_fields(torch::optim::SGDParamState& state, Visit visit) {
  visit("momentum_buffer", state.momentum_buffer());
}
template <class Visit>
void visit_fields(torch::optim::RMSpropParamState& state, Visit visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}
template <class Visit>
void visit_fields(torch::optim::AdagradParamState& state, Visit visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}

template <class Options, class Visit>
void visit_adam_options(Options& options, Visit visit) {
  visit("lr", options.lr());
  visit("beta1", std::get<0>(options.betas()));
  visit("beta2", std::get<1>(options.betas()));
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
template <class Visit>
void visit_fields(torch::optim::AdamOptions& options, Visit visit) {
  visit_adam_options(options, visit);
}
template <class Visit>
void visit_fields(torch::optim::AdamWOptions& options, Visit visit) {
  visit_adam_options(options, visit);
}
template <class Visit>
void visit_fields(torch::optim::SGDOptions& options, Visit visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
template <class Visit>
void visit_fields(torch::optim::RMSpropOptions& options, Visit visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}
template <class Visit>
void visit_fields(torch::optim::AdagradOptions& options, Visit visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}

/// Types of a known optimizer.
template <class StateType, class OptionsType>
struct OptimizerTypes {
  using State = StateType;
  using Options = OptionsType;
};

/// Calls `use` with the OptimizerTypes of `optimizer`. Throws NotImplementedError, naming `where`, for other types.
template <class Use>
void with_types(const torch::optim::Optimizer& optimizer, const char* where, Use use) {
  namespace optim = torch::optim;
  if (dynamic_cast<const optim::Adam*>(&optimizer)) {
    use(OptimizerTypes<optim::AdamParamState, optim::AdamOptions>());
  } else if (dynamic_cast<const optim::AdamW*>(&optimizer)) {
    use(OptimizerTypes<optim::AdamWParamState, optim::AdamWOptions>());
  } else if (dynamic_cast<const optim::SGD*>(&optimizer)) {
    use(OptimizerTypes<optim::SGDParamState, optim::SGDOptions>());
  } else if (dynamic_cast<const optim::RMSprop*>(&optimizer)) {
    use(OptimizerTypes<optim::RMSpropParamState, optim::RMSpropOptions>());
  } else if (dynamic_cast<const optim::Adagrad*>(&optimizer)) {
    use(OptimizerTypes<optim::AdagradParamState, optim::AdagradOptions>());
  } else {
    TESSERA_CHECK(NotImplementedError, false,
                  "{}: an optimizer of a type whose state is unknown; known are Adam, AdamW, SGD, RMSprop and Adagrad. "
                  "Keep another one's yourself, in State::user of a checkpoint say",
                  where);
  }
}

/// Returns the initial state before the first step: null except for Adagrad, whose constructor creates state for
/// step().
template <class Types>
std::unique_ptr<typename Types::State> initial_state(const at::Tensor& param, const typename Types::Options& options) {
  if constexpr (std::is_same_v<typename Types::State, torch::optim::AdagradParamState>) {
    const at::NoGradGuard no_grad;
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->sum(at::full_like(param.detach(), options.initial_accumulator_value()));
    return state;
  }
  return nullptr;
}

}  // namespace tessera
