#include "tests/fully_shard/models/random_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "tests/fully_shard/models/own_product.h"

namespace tessera::testing {

namespace {

struct OpTraits {
  ModelOp op;
  const char* name;
  int fewest, most;  // inner modules
};

const std::vector<OpTraits> kOps = {
    {ModelOp::Linear, "Linear", 0, 0},
    {ModelOp::Scale, "Scale", 0, 0},
    {ModelOp::Fork, "Fork", 0, 0},
    {ModelOp::Swap, "Swap", 0, 0},
    {ModelOp::Detach, "Detach", 0, 0},
    {ModelOp::Repeat, "Repeat", 0, 0},
    {ModelOp::TakesTwice, "TakesTwice", 0, 0},
    {ModelOp::Tied, "Tied", 0, 0},
    {ModelOp::Own, "Own", 0, 0},
    {ModelOp::DoublesGrad, "DoublesGrad", 0, 0},
    {ModelOp::ViewOfInput, "ViewOfInput", 0, 0},
    {ModelOp::ViewAndBase, "ViewAndBase", 0, 0},
    {ModelOp::Overlapping, "Overlapping", 0, 0},
    {ModelOp::AddInPlace, "AddInPlace", 0, 0},
    {ModelOp::MulInPlace, "MulInPlace", 0, 0},
    {ModelOp::Chain, "Chain", 1, 3},
    {ModelOp::Chain, "Chain", 1, 3},
    {ModelOp::Residual, "Residual", 1, 1},
    {ModelOp::Twice, "Twice", 1, 1},
    {ModelOp::Branches, "Branches", 2, 2},
    {ModelOp::Discard, "Discard", 1, 1},
    {ModelOp::WithoutGrad, "WithoutGrad", 1, 1},
    {ModelOp::Sometimes, "Sometimes", 1, 1},
};

const OpTraits& traits_of(ModelOp op) {
  return *std::ranges::find(kOps, op, &OpTraits::op);
}

bool has_matrix(ModelOp op) {
  return op == ModelOp::Linear || op == ModelOp::Tied;
}

}  // namespace

ModelSpec ModelSpec::draw(Draws& draws, int depth) {
  const auto is_leaf = [](const OpTraits& op) { return op.most == 0; };
  const auto* traits = &draws.of(kOps);
  while (depth == 0 && !is_leaf(*traits)) {
    traits = &draws.of(kOps);
  }
  ModelSpec spec{.op = traits->op,
                 .is_unit = draws.one_in(2),
                 .is_replicated = draws.one_in(5),
                 .cuts_columns = draws.one_in(4),
                 .reshard_after_forward = static_cast<int>(draws.between(-1, 2)),
                 .is_checkpointed = draws.one_in(8),
                 .is_frozen = draws.one_in(12)};
  for (int64_t i = draws.between(traits->fewest, traits->most); i > 0; --i) {
    spec.inner.push_back(draw(draws, depth - 1));
  }
  return spec;
}

std::string ModelSpec::to_string() const {
  static constexpr const char* kReshards[] = {"", "(keeps)", "(frees)", "(keeps shares)"};
  std::string text;
  if (is_unit) {
    text += is_replicated ? "replicated " : fmt::format("unit{} ", kReshards[reshard_after_forward + 1]);
    text += cuts_columns ? "cut by columns " : "";
  }
  text += fmt::format("{}{}{}", is_frozen ? "frozen " : "", is_checkpointed ? "checkpointed " : "", traits_of(op).name);
  for (size_t i = 0; i < inner.size(); ++i) {
    text += (i == 0 ? "(" : ", ") + inner[i].to_string();
  }
  return text + (inner.empty() ? "" : ")");
}

bool ModelSpec::has_any(const std::function<bool(const ModelSpec&)>& trait) const {
  return trait(*this) || std::ranges::any_of(inner, [&](const ModelSpec& spec) { return spec.has_any(trait); });
}

std::vector<ModelSpec> ModelSpec::smaller() const {
  std::vector<ModelSpec> all = inner;
  const auto add = [&](auto change) {
    all.push_back(*this);
    change(all.back());
  };
  if (static_cast<int>(inner.size()) > traits_of(op).fewest) {
    for (size_t i = 0; i < inner.size(); ++i) {
      add([&](ModelSpec& spec) { spec.inner.erase(spec.inner.begin() + static_cast<int64_t>(i)); });
    }
  }
  for (size_t i = 0; i < inner.size(); ++i) {
    for (auto& child : inner[i].smaller()) {
      add([&](ModelSpec& spec) { spec.inner[i] = std::move(child); });
    }
  }
  if (inner.empty() && op != ModelOp::Scale) {
    add([](ModelSpec& spec) { spec.op = ModelOp::Scale; });
  }
  for (auto mark : {&ModelSpec::is_unit, &ModelSpec::is_replicated, &ModelSpec::cuts_columns,
                    &ModelSpec::is_checkpointed, &ModelSpec::is_frozen}) {
    if (this->*mark) {
      add([&](ModelSpec& spec) { spec.*mark = false; });
    }
  }
  if (reshard_after_forward != -1) {
    add([](ModelSpec& spec) { spec.reshard_after_forward = -1; });
  }
  return all;
}

RandomModelImpl::RandomModelImpl(const ModelSpec& spec) : op_(spec.op) {
  if (spec.inner.empty() && op_ != ModelOp::Swap) {
    const auto sizes = has_matrix(op_) ? std::vector{kDim, kDim} : std::vector{kDim};
    p_ = register_parameter("p", at::empty(sizes, at::kDouble));
    q_ = register_parameter("q", op_ == ModelOp::Tied ? p_ : at::empty({kDim}, at::kDouble));
  }
  for (size_t i = 0; i < spec.inner.size(); ++i) {
    register_module("m" + std::to_string(i), RandomModel(spec.inner[i]));
  }
}

RandomModelImpl::Pair RandomModelImpl::call(size_t child, Pair inputs) {
  auto& [a, b] = inputs;
  return static_cast<RandomModel::Impl&>(*children().at(child)).forward(std::move(a), std::move(b));
}

RandomModelImpl::Pair RandomModelImpl::forward(at::Tensor a, at::Tensor b) {
  switch (op_) {
    case ModelOp::Linear:
      return {at::linear(a, p_, q_).sin(), b};
    case ModelOp::Scale:
      return {a * p_ + b * q_, b};
    case ModelOp::Fork:
      return {a * p_, a.sin() * q_};
    case ModelOp::Swap:
      return {b, a};
    case ModelOp::Detach:
      return {a * p_ + b * q_, b.detach()};
    case ModelOp::Repeat: {
      const auto product = a * p_;
      return {product, product};
    }
    case ModelOp::TakesTwice:
      return {a * p_ + a, a};
    case ModelOp::Tied:
      return {at::linear(at::linear(a, p_), q_), b};
    case ModelOp::Own:
      return {OwnProduct::apply(a, p_), OwnProduct::apply(b, q_)};
    case ModelOp::DoublesGrad: {
      auto product = a * p_;
      if (product.requires_grad()) {
        product.register_hook([](const at::Tensor& grad) { return grad * 2; });
      }
      return {product, b};
    }
    case ModelOp::ViewOfInput:
      return {a.view(a.sizes()), a * p_ + b * q_};
    case ModelOp::ViewAndBase: {
      const auto product = a * p_;
      return {product.t().t(), product};
    }
    case ModelOp::Overlapping: {
      const auto rows = at::cat({a * p_, b * q_});
      return {rows.narrow(0, 0, a.size(0)), rows.narrow(0, 1, b.size(0))};
    }
    case ModelOp::AddInPlace:
      return {a.add_(p_), b};
    case ModelOp::MulInPlace:
      return {a.mul_(p_), b * q_};
    case ModelOp::Chain: {
      Pair pair(std::move(a), std::move(b));
      for (size_t i = 0; i < children().size(); ++i) {
        pair = call(i, std::move(pair));
      }
      return pair;
    }
    case ModelOp::Residual: {
      const auto [c, d] = call(0, {a, b});
      return {a + c, b + d};
    }
    case ModelOp::Twice:
      return call(0, call(0, {a, b}));
    case ModelOp::Branches: {
      const auto first = std::get<0>(call(0, {a, b}));
      return {first, std::get<1>(call(1, {a, b}))};
    }
    case ModelOp::Discard:
      call(0, {a, b});
      return {a, b};
    case ModelOp::WithoutGrad: {
      const auto [c, d] = [&] {
        const at::NoGradGuard no_grad;
        return call(0, {a, b});
      }();
      return {a + c, b};
    }
    case ModelOp::Sometimes:
      return step_ % 2 == 1 ? call(0, {a, b}) : Pair(a, b);
  }
  return {};
}

void RandomModelImpl::set_step(int step) {
  apply([step](torch::nn::Module& module) { dynamic_cast<RandomModelImpl&>(module).step_ = step; });
}

}  // namespace tessera::testing
