// Ops that go element by element.

#include "tests/dtensor/random_program/random_program_ops.h"

namespace tessera::random_program {

std::optional<Step> unary(Scene& scene) {
  static const std::vector<OfOne> ops = {
      {"neg", [](const at::Tensor& x) { return x.neg(); }},
      {"tanh", [](const at::Tensor& x) { return x.tanh(); }},
      {"sigmoid", [](const at::Tensor& x) { return x.sigmoid(); }},
      {"relu", [](const at::Tensor& x) { return x.relu(); }},
      {"gelu", [](const at::Tensor& x) { return at::gelu(x); }},
      {"silu", [](const at::Tensor& x) { return at::silu(x); }},
      {"softplus", [](const at::Tensor& x) { return at::softplus(x); }},
      {"abs", [](const at::Tensor& x) { return x.abs(); }},
      {"cos", [](const at::Tensor& x) { return x.cos(); }},
      {"square", [](const at::Tensor& x) { return x.square(); }},
      {"reciprocal of 1 + square", [](const at::Tensor& x) { return x.square().add(1).reciprocal(); }},
      {"add(0.5)", [](const at::Tensor& x) { return x.add(0.5); }},
      {"mul(-1.5)", [](const at::Tensor& x) { return x.mul(-1.5); }},
      {"clamp(-0.5, 0.5)", [](const at::Tensor& x) { return x.clamp(-0.5, 0.5); }},
      {"leaky_relu(0.1)", [](const at::Tensor& x) { return at::leaky_relu(x, 0.1); }},
      {"clone", [](const at::Tensor& x) { return x.clone(); }},
      {"contiguous", [](const at::Tensor& x) { return x.contiguous(); }},
      {"gt(0)", [](const at::Tensor& x) { return x.gt(0); }},
      {"where(x > 0, x, 0.1)", [](const at::Tensor& x) { return at::where(x.gt(0), x, 0.1); }},
      {"masked_fill(x > 0, 2)", [](const at::Tensor& x) { return x.masked_fill(x.gt(0), 2); }},
      {"zeros_like", [](const at::Tensor& x) { return at::zeros_like(x); }},
      {"1 - x", [](const at::Tensor& x) { return 1 - x; }},
      {"-0.5 - x", [](const at::Tensor& x) { return -0.5 - x; }},
      {"2 / (1 + square)", [](const at::Tensor& x) { return 2 / x.square().add(1); }},
      {"1 / x", [](const at::Tensor& x) { return 1 / x; }},
      {"x / 3", [](const at::Tensor& x) { return x / 3; }},
      {"rsub(x, 2, alpha -3)", [](const at::Tensor& x) { return at::rsub(x, 2, -3); }},
      {"pow(3)", [](const at::Tensor& x) { return x.pow(3); }},
      {"pow(2, x)", [](const at::Tensor& x) { return at::pow(2, x); }},
      {"exp", [](const at::Tensor& x) { return x.exp(); }},
      {"expm1", [](const at::Tensor& x) { return x.expm1(); }},
      {"log of 1 + abs", [](const at::Tensor& x) { return x.abs().log1p(); }},
      {"sqrt of 1 + square", [](const at::Tensor& x) { return x.square().add(1).sqrt(); }},
      {"rsqrt of 1 + square", [](const at::Tensor& x) { return x.square().add(1).rsqrt(); }},
      {"sin", [](const at::Tensor& x) { return x.sin(); }},
      {"erf", [](const at::Tensor& x) { return x.erf(); }},
      {"floor", [](const at::Tensor& x) { return x.floor(); }},
      {"round", [](const at::Tensor& x) { return x.round(); }},
      {"sign", [](const at::Tensor& x) { return x.sign(); }},
      {"frac", [](const at::Tensor& x) { return x.frac(); }},
      {"remainder(0.7)", [](const at::Tensor& x) { return x.remainder(0.7); }},
      {"fmod(0.7)", [](const at::Tensor& x) { return x.fmod(0.7); }},
      {"div(0.7, floor)", [](const at::Tensor& x) { return x.div(0.7, "floor"); }},
      {"elu", [](const at::Tensor& x) { return at::elu(x); }},
      {"celu", [](const at::Tensor& x) { return at::celu(x, 0.8); }},
      {"selu", [](const at::Tensor& x) { return at::selu(x); }},
      {"mish", [](const at::Tensor& x) { return at::mish(x); }},
      {"hardswish", [](const at::Tensor& x) { return at::hardswish(x); }},
      {"hardsigmoid", [](const at::Tensor& x) { return at::hardsigmoid(x); }},
      {"hardtanh", [](const at::Tensor& x) { return at::hardtanh(x, -0.6, 0.8); }},
      {"log_sigmoid", [](const at::Tensor& x) { return at::log_sigmoid(x); }},
      {"softshrink", [](const at::Tensor& x) { return at::softshrink(x, 0.3); }},
      {"threshold", [](const at::Tensor& x) { return at::threshold(x, 0.1, 0.7); }},
      {"relu6", [](const at::Tensor& x) { return at::relu6(x); }},
      {"gelu tanh", [](const at::Tensor& x) { return at::gelu(x, "tanh"); }},
      {"clamp_min(0.2)", [](const at::Tensor& x) { return x.clamp_min(0.2); }},
      {"nan_to_num", [](const at::Tensor& x) { return x.nan_to_num(); }},
      {"ones_like", [](const at::Tensor& x) { return at::ones_like(x); }},
      {"full_like", [](const at::Tensor& x) { return at::full_like(x, 0.3); }},
      {"new_zeros", [](const at::Tensor& x) { return x.new_zeros(x.sizes()).add(x); }},
      {"to float and back", [](const at::Tensor& x) { return x.round().to(at::kFloat).to(at::kDouble); }},
      {"signbit", [](const at::Tensor& x) { return x.signbit(); }},
      {"isfinite", [](const at::Tensor& x) { return x.isfinite(); }},
      {"le(0.3)", [](const at::Tensor& x) { return x.le(0.3); }},
      {"ne(itself)", [](const at::Tensor& x) { return x.ne(x); }},
      {"to(long)", [](const at::Tensor& x) { return x.mul(3).to(at::kLong); }},
      {"clone().neg_", [](const at::Tensor& x) { return x.clone().neg_(); }},
      {"clone().sub_(10)", [](const at::Tensor& x) { return x.clone().sub_(10); }},
      {"clone().mul_(-2)", [](const at::Tensor& x) { return x.clone().mul_(-2); }},
      {"clone().clamp_(-0.5, 0.5)", [](const at::Tensor& x) { return x.clone().clamp_(-0.5, 0.5); }},
      {"clone().fill_(0.5)", [](const at::Tensor& x) { return x.clone().fill_(0.5); }},
      {"clone().zero_()", [](const at::Tensor& x) { return x.clone().zero_(); }},
      {"clone().tanh_()", [](const at::Tensor& x) { return x.clone().tanh_(); }},
      {"clone().pow_(2)", [](const at::Tensor& x) { return x.clone().pow_(2); }},
      {"clone().masked_fill_", [](const at::Tensor& x) { return x.clone().masked_fill_(x.lt(0), -1); }},
      {"detach", [](const at::Tensor& x) { return x.detach(); }},
  };
  return draw_of_one(scene, scene.value(), ops);
}

std::optional<Step> binary(Scene& scene) {
  struct Op {
    const char* name;
    at::Tensor (*run)(const at::Tensor&, const at::Tensor&);
  };
  using T = const at::Tensor&;
  static const std::vector<Op> ops = {
      {"add", [](T a, T b) { return a.add(b); }},
      {"sub(alpha 2)", [](T a, T b) { return a.sub(b, 2); }},
      {"mul", [](T a, T b) { return a.mul(b); }},
      {"div(1 + square)", [](T a, T b) { return a.div(b.square().add(1)); }},
      {"maximum", [](T a, T b) { return at::maximum(a, b); }},
      {"where(a > b, a, b)", [](T a, T b) { return at::where(a.gt(b), a, b); }},
      {"addcmul(a, a, b)", [](T a, T b) { return at::addcmul(a, a, b); }},
      {"lerp(a, b, 0.3)", [](T a, T b) { return at::lerp(a, b, 0.3); }},
      {"minimum", [](T a, T b) { return at::minimum(a, b); }},
      {"fmax", [](T a, T b) { return at::fmax(a, b); }},
      {"atan2", [](T a, T b) { return at::atan2(a, b.square().add(1)); }},
      {"hypot", [](T a, T b) { return at::hypot(a, b.square().add(1)); }},
      {"logaddexp", [](T a, T b) { return at::logaddexp(a, b); }},
      {"rsub", [](T a, T b) { return at::rsub(a, b); }},
      {"pow of positive", [](T a, T b) { return a.abs().add(0.5).pow(b); }},
      {"remainder", [](T a, T b) { return a.remainder(b.square().add(1)); }},
      {"xlogy", [](T a, T b) { return at::xlogy(a, b.square().add(1)); }},
      {"addcdiv", [](T a, T b) { return at::addcdiv(a, a, b.square().add(1), -0.5); }},
      {"lerp(a, b, a)", [](T a, T b) { return at::lerp(a, b, a); }},
      {"clamp(a, max b)", [](T a, T b) { return a.clamp(std::nullopt, b); }},
      {"a < b", [](T a, T b) { return a.lt(b); }},
      {"a == b", [](T a, T b) { return a.eq(b); }},
      {"isclose", [](T a, T b) { return at::isclose(a, b); }},
      {"where(a > 0, b, 1)", [](T a, T b) { return at::where(a.gt(0), b, 1.0); }},
      {"masked_fill(a > 0, b.sum)", [](T a, T b) { return a.masked_fill(a.gt(0), b.sum()); }},
      {"clone().sub_", [](T a, T b) { return a.clone().sub_(b); }},
      {"clone().div_", [](T a, T b) { return a.clone().div_(b.square().add(1)); }},
      {"clone().addcmul_", [](T a, T b) { return a.clone().addcmul_(b, b, 2); }},
      {"clone().lerp_", [](T a, T b) { return a.clone().lerp_(b, 0.3); }},
      {"clone()[0].add_",
       [](T a, T b) {
         auto y = a.clone();
         y.select(0, 0).add_(b);
         return y;
       }},
      {"mul(a, norm b)", [](T a, T b) { return a / (1 + b.norm()); }},
      {"broadcast_to", [](T a, T b) { return a.expand_as(b).mul(b); }},
      {"mul of float", [](T a, T b) { return a.mul(b.round().to(at::kFloat)); }},
      {"clone().add_", [](T a, T b) { return a.clone().add_(b); }},
      {"clone().mul_", [](T a, T b) { return a.clone().mul_(b); }},
      {"clone().copy_", [](T a, T b) { return a.clone().copy_(b); }},
  };
  const auto a = scene.value();
  const auto b = scene.value();
  if (!a || !b) {
    return std::nullopt;
  }
  const auto& op = scene.draws.of(ops);
  return Step{
      fmt::format("{}(v{}, v{})", op.name, *a, *b), {*a, *b}, [run = op.run](Read x) { return run(x[0], x[1]); }};
}

std::optional<Step> of_whole_numbers(Scene& scene) {
  using T = const at::Tensor&;
  static const std::vector<OfOne> ops = {
      {"to(double)", [](T x) { return x.to(at::kDouble); }},
      {"add(1)", [](T x) { return x.add(1); }},
      {"mul(0.5)", [](T x) { return x.mul(0.5); }},
      {"div(2)", [](T x) { return x.div(2); }},
      {"div(2, floor)", [](T x) { return x.div(2, "floor"); }},
      {"remainder(2)", [](T x) { return x.remainder(2); }},
      {"3 - x", [](T x) { return 3 - x.to(at::kLong); }},
      {"eq(0)", [](T x) { return x.eq(0); }},
      {"logical_not", [](T x) { return x.logical_not(); }},
      {"bitwise_not", [](T x) { return x.bitwise_not(); }},
      {"sum", [](T x) { return x.sum(); }},
      {"prod", [](T x) { return x.prod(); }},
      {"any", [](T x) { return x.any(); }},
      {"all", [](T x) { return x.all(); }},
      {"any(-1)", [](T x) { return x.any(-1); }},
      {"all(0)", [](T x) { return x.all(0, true); }},
      {"amax(0)", [](T x) { return x.amax(0); }},
      {"sum(-1)", [](T x) { return x.sum(-1); }},
      {"cumsum(0)", [](T x) { return x.cumsum(0); }},
      {"count_nonzero(0)", [](T x) { return x.count_nonzero(at::IntArrayRef{0}); }},
      {"sqrt", [](T x) { return x.square().sqrt(); }},
      {"mean in double", [](T x) { return x.mean(at::kDouble); }},
  };
  return draw_of_one(scene, scene.whole_numbers(), ops);
}

}  // namespace tessera::random_program
