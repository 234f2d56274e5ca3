#include "optim/fused_optimizers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "optim/adam_scalars.h"
#include "optim/vector_tails.h"

namespace tessera::optim {

/// State of an optimizer whose step may be captured.
struct CapturableAdam {
  AdamScalars scalars;
  std::vector<torch::optim::OptimizerParamState*> stepped;  // by the last step
};

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

at::Tensor call(const Optimizer::LossClosure& closure) {
  const at::AutoGradMode grad_mode(true);
  return closure ? closure() : at::Tensor();
}

using TensorList = std::vector<at::Tensor>;

bool has_kernels(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

/// Checks a parameter; `index` is its position in the group.
void check_steppable(const at::Tensor& param, size_t index) {
  const auto& grad = param.grad();
  TESSERA_CHECK(
      NotImplementedError, has_kernels(param.scalar_type()),
      "fused optimizer: parameter {} of its group is {}; libtorch's fused kernels step Float, Double, Half and "
      "BFloat16. Keep it as one of these, and cast it, or view it by at::view_as_complex, where it is used",
      index, c10::toString(param.scalar_type()));
  TESSERA_CHECK(ValueError, !grad.is_sparse(),
                "fused optimizer: parameter {} of its group has a sparse gradient; take torch::optim's own", index);
  TESSERA_CHECK(ValueError, grad.scalar_type() == param.scalar_type(),
                "fused optimizer: parameter {} of its group is {}, its gradient {}; they must be alike", index,
                c10::toString(param.scalar_type()), c10::toString(grad.scalar_type()));
}

/// Checks that `state`, from an earlier step, matches its parameter.
void check_alike(const at::Tensor& param, const at::Tensor& state) {
  TESSERA_CHECK(ValueError, state.scalar_type() == param.scalar_type() && state.device() == param.device(),
                "fused optimizer: a parameter is {} on {}, but its state {} on {}: it was converted since. Make the "
                "optimizer anew, or convert the state",
                c10::toString(param.scalar_type()), param.device().str(), c10::toString(state.scalar_type()),
                state.device().str());
}

/// Returns the parameters of a group that have a gradient.
TensorList params_to_step(const OptimizerParamGroup& group) {
  TensorList params;
  for (size_t index = 0; index < group.params().size(); ++index) {
    const auto& param = group.params()[index];
    if (param.grad().defined()) {
      check_steppable(param, index);
      params.push_back(param);
    }
  }
  return params;
}

/// Distinct parameters of one group.
struct Round {
  size_t group;
  TensorList params;
};

/// Adds rounds. A kernel steps its parameters in any order or concurrently, so one that is listed twice is in two
/// rounds.
void add_rounds(size_t group, TensorList params, std::vector<Round>& rounds) {
  while (!params.empty()) {
    std::unordered_set<c10::TensorImpl*> seen;
    Round round{.group = group, .params = {}};
    TensorList again;
    for (auto& param : params) {
      auto& list = seen.insert(param.unsafeGetTensorImpl()).second ? round.params : again;
      list.push_back(std::move(param));
    }
    rounds.push_back(std::move(round));
    params = std::move(again);
  }
}

/// Makes and checks all rounds before any parameter changes.
std::vector<Round> rounds_to_step(const std::vector<OptimizerParamGroup>& groups) {
  std::vector<Round> rounds;
  for (size_t group = 0; group < groups.size(); ++group) {
    add_rounds(group, params_to_step(groups[group]), rounds);
  }
  return rounds;
}

/// Properties that the tensors of one op share: kernels need one device and dtype, and an op's DTensors one mesh.
struct Kind {
  at::Device device;
  at::ScalarType dtype;
  DeviceMesh mesh;  // empty for plain tensors

  bool operator==(const Kind&) const = default;
};

Kind classify(const at::Tensor& param) {
  return {.device = param.device(),
          .dtype = param.scalar_type(),
          .mesh = is_dtensor(param) ? device_mesh(param) : DeviceMesh()};
}

/// Lists by kind, in order of occurrence, which is equal on all ranks, because steps may communicate.
template <class Lists>
using ByKind = std::deque<std::pair<Kind, Lists>>;

template <class Lists>
Lists& find_or_add(ByKind<Lists>& lists, const at::Tensor& param) {
  auto kind = classify(param);
  const auto found = std::find_if(lists.begin(), lists.end(), [&](const auto& entry) { return entry.first == kind; });
  return found == lists.end() ? lists.emplace_back(std::move(kind), Lists()).second : found->second;
}

/// Returns whether layouts match, because kernels process the memory of all lists in order and ignore strides.
template <class... Others>
bool have_same_layout(const at::Tensor& param, const Others&... others) {
  return param.is_non_overlapping_and_dense() && ((others.strides() == param.strides()) && ...);
}

/// Row-major copies of tensors whose memory layout differs from that of their parameter's other tensors.
class RowMajorCopies {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto copy = tensor.contiguous();
    if (!copy.is_same(tensor)) {
      written_.emplace_back(tensor, copy);
    }
    return copy;
  }
  void write_back() const {
    for (const auto& [tensor, copy] : written_) {
      tensor.copy_(copy);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

template <class State>
struct AdamLists {
  std::vector<State*> states;
  TensorList params, grads, averages, squares, largest_squares, steps;
  std::map<int64_t, at::Tensor> step_counts;  // shared by parameters with the same count
  RowMajorCopies copies;

  /// Adds a parameter. `scalars` may be null.
  void add(const at::Tensor& param, State& state, bool amsgrad, const AdamScalars* scalars) {
    states.push_back(&state);
    const int64_t step = state.step() + 1;
    auto& count = step_counts[step];
    if (!count.defined()) {
      count = scalars ? scalars->count(state.step())
                      : at::full({}, step, at::TensorOptions(param.device()).dtype(at::kFloat));
    }
    const auto& grad = param.grad();
    const auto& largest = amsgrad ? state.max_exp_avg_sq() : state.exp_avg_sq();
    const bool as_is = have_same_layout(param, grad, state.exp_avg(), state.exp_avg_sq(), largest);
    params.push_back(as_is ? param : copies.of(param));
    grads.push_back(as_is ? grad : grad.contiguous());
    averages.push_back(as_is ? state.exp_avg() : copies.of(state.exp_avg()));
    squares.push_back(as_is ? state.exp_avg_sq() : copies.of(state.exp_avg_sq()));
    if (amsgrad) {
      largest_squares.push_back(as_is ? largest : copies.of(largest));
    }
    steps.push_back(count);
  }
};

/// Makes the state like libtorch's step().
template <class State>
State& adam_state(Optimizer& optimizer, const at::Tensor& param, bool amsgrad) {
  auto& slot = optimizer.state()[param.unsafeGetTensorImpl()];
  if (!slot) {
    auto state = std::make_unique<State>();
    state->step(0);
    state->exp_avg(at::zeros_like(param));
    state->exp_avg_sq(at::zeros_like(param));
    slot = std::move(state);
  }
  auto& state = static_cast<State&>(*slot);
  if (amsgrad && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(at::zeros_like(param));
  }
  return state;
}

/// Adds 1 to the step counts on the device, and keeps the states that step.
template <class State>
void begin_step(CapturableAdam& captured, Optimizer& optimizer, const std::vector<Round>& rounds) {
  TESSERA_CHECK(NotImplementedError, rounds.size() <= optimizer.param_groups().size(),
                "fused optimizer: a parameter is listed twice in a group, whose step is not captured");
  captured.stepped.clear();
  std::vector<int64_t> counts;
  for (const auto& round : rounds) {
    for (const auto& param : round.params) {
      auto* state = optimizer.state().at(param.unsafeGetTensorImpl()).get();
      captured.stepped.push_back(state);
      counts.push_back(static_cast<State&>(*state).step());
    }
  }
  if (!counts.empty()) {
    captured.scalars.begin_step(counts, rounds[0].params[0].device());
  }
}

/// Steps the parameters. `captured` is null without a CapturedStep.
template <class State, class Options, class Op>
void adam_step(Optimizer& optimizer, CapturableAdam* captured, Op op) {
  const at::NoGradGuard no_grad;
  const auto rounds = rounds_to_step(optimizer.param_groups());
  const auto options_of = [&](size_t group) -> const Options& {
    return static_cast<const Options&>(optimizer.param_groups()[group].options());
  };
  for (const auto& [group, params] : rounds) {
    for (const auto& param : params) {
      check_alike(param, adam_state<State>(optimizer, param, options_of(group).amsgrad()).exp_avg());
    }
  }
  if (captured) {
    begin_step<State>(*captured, optimizer, rounds);
  }
  for (const auto& round : rounds) {
    const size_t group = round.group;
    const auto& options = options_of(group);
    ByKind<AdamLists<State>> lists;
    for (const auto& param : round.params) {
      auto& state = adam_state<State>(optimizer, param, options.amsgrad());
      find_or_add(lists, param).add(param, state, options.amsgrad(), captured ? &captured->scalars : nullptr);
    }
    for (const auto& entry : lists) {
      const auto& own = entry.second;
      const auto betas = options.betas();
      const auto step_at = [&](const std::vector<TensorList>& of, const TensorList& steps, const auto& lr) {
        op(of[0], of[1], of[2], of[3], of[4], steps, lr, std::get<0>(betas), std::get<1>(betas), options.weight_decay(),
           options.eps(), options.amsgrad(), /*maximize=*/false, std::nullopt, std::nullopt);
      };
      const auto step = [&](const std::vector<TensorList>& of, const TensorList& steps) {
        if (captured) {
          step_at(of, steps, captured->scalars.learning_rate(group, options.lr(), own.params[0].device()));
        } else {
          step_at(of, steps, options.lr());
        }
      };
      const VectorTails tails({&own.params, &own.grads, &own.averages, &own.squares, &own.largest_squares}, own.steps);
      step({own.params, own.grads, own.averages, own.squares, own.largest_squares}, own.steps);
      tails.step(step);
      own.copies.write_back();
      for (auto* state : own.states) {  // not counted if the step threw
        state->step(state->step() + 1);
      }
    }
  }
  if (captured) {
    captured->scalars.end_step();
  }
}

template <class Options>
void write_learning_rates(Optimizer& optimizer, CapturableAdam& captured) {
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    if (!groups[group].params().empty()) {
      captured.scalars.learning_rate(group, static_cast<const Options&>(groups[group].options()).lr(),
                                     groups[group].params()[0].device());
    }
  }
}

template <class State>
void count_step(CapturableAdam& captured) {
  for (auto* state : captured.stepped) {
    auto& own = static_cast<State&>(*state);
    own.step(own.step() + 1);
  }
  captured.scalars.end_step();
}

struct SGDLists {
  TensorList params, grads, buffers;
  std::vector<std::pair<torch::optim::SGDParamState*, at::Tensor>> new_momenta;  // uninitialized before the step
  RowMajorCopies copies;

  /// Adds a parameter. `momentum` may be undefined.
  void add(const at::Tensor& param, const at::Tensor& momentum) {
    const auto& grad = param.grad();
    const bool as_is = have_same_layout(param, grad, momentum.defined() ? momentum : param);
    params.push_back(as_is ? param : copies.of(param));
    grads.push_back(as_is ? grad : grad.contiguous());
    if (momentum.defined()) {
      buffers.push_back(as_is ? momentum : copies.of(momentum));
    }
  }

  void step(const torch::optim::SGDOptions& options, bool is_first) {
    if (!params.empty()) {
      const auto step_lists = [&](const std::vector<TensorList>& of, const TensorList&) {
        at::_fused_sgd_(of[0], of[1], of[2], options.weight_decay(), options.momentum(), options.lr(),
                        options.dampening(), options.nesterov(), /*maximize=*/false, is_first);
      };
      const VectorTails tails({&params, &grads, &buffers}, {});
      step_lists({params, grads, buffers}, {});
      tails.step(step_lists);
      copies.write_back();
      for (auto& [state, momentum] : new_momenta) {  // not set if the step threw
        state->momentum_buffer(std::move(momentum));
      }
    }
  }
};

torch::optim::SGDParamState& sgd_state(Optimizer& optimizer, const at::Tensor& param) {
  auto& slot = optimizer.state()[param.unsafeGetTensorImpl()];
  if (!slot) {
    slot = std::make_unique<torch::optim::SGDParamState>();
  }
  return static_cast<torch::optim::SGDParamState&>(*slot);
}

}  // namespace

at::Tensor FusedAdam::step(LossClosure closure) {
  auto loss = call(closure);
  adam_step<torch::optim::AdamParamState, torch::optim::AdamOptions>(
      *this, captured_.get(), [](const auto&... args) { at::_fused_adam_(args...); });
  return loss;
}

void FusedAdam::make_capturable() {
  captured_ = std::make_shared<CapturableAdam>();
}

void FusedAdam::set_capturing(bool capturing) {
  captured_->scalars.set_capturing(capturing);
}

void FusedAdam::before_replay() {
  write_learning_rates<torch::optim::AdamOptions>(*this, *captured_);
}

void FusedAdam::after_replay() {
  count_step<torch::optim::AdamParamState>(*captured_);
}

at::Tensor FusedAdamW::step(LossClosure closure) {
  auto loss = call(closure);
  adam_step<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(
      *this, captured_.get(), [](const auto&... args) { at::_fused_adamw_(args...); });
  return loss;
}

void FusedAdamW::make_capturable() {
  captured_ = std::make_shared<CapturableAdam>();
}

void FusedAdamW::set_capturing(bool capturing) {
  captured_->scalars.set_capturing(capturing);
}

void FusedAdamW::before_replay() {
  write_learning_rates<torch::optim::AdamWOptions>(*this, *captured_);
}

void FusedAdamW::after_replay() {
  count_step<torch::optim::AdamWParamState>(*captured_);
}

at::Tensor FusedSGD::step(LossClosure closure) {
  auto loss = call(closure);
  const at::NoGradGuard no_grad;
  const auto rounds = rounds_to_step(param_groups());
  for (const auto& [group, params] : rounds) {
    for (const auto& param : params) {
      const auto found = state().find(param.unsafeGetTensorImpl());
      if (found != state().end()) {
        const auto& momentum = static_cast<torch::optim::SGDParamState&>(*found->second).momentum_buffer();
        check_alike(param, momentum.defined() ? momentum : param);
      }
    }
  }
  for (const auto& [group, params] : rounds) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(param_groups()[group].options());
    ByKind<std::array<SGDLists, 2>> lists;  // with and without an earlier momentum
    for (const auto& param : params) {
      auto& [before, anew] = find_or_add(lists, param);
      if (options.momentum() == 0) {
        before.add(param, at::Tensor());
        continue;
      }
      auto& state = sgd_state(*this, param);
      if (state.momentum_buffer().defined()) {
        before.add(param, state.momentum_buffer());
      } else {
        anew.add(param, anew.new_momenta.emplace_back(&state, at::empty_like(param)).second);
      }
    }
    for (auto& [kind, both] : lists) {
      both[0].step(options, /*is_first=*/false);
      both[1].step(options, /*is_first=*/true);
    }
  }
  return loss;
}

}  // namespace tessera::optim
