// Less common elementwise functions.

#include "dtensor/ops/pointwise/pointwise.h"

#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

constexpr const char* kSpecialPointwise = R"(
    _conj_physical bitwise_left_shift.Tensor bitwise_left_shift_.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor bitwise_right_shift_.Tensor
    bitwise_right_shift.Tensor_Scalar celu celu_ elu_backward gcd gcd_ hardshrink hardshrink_backward heaviside_
    hypot_ i0 i0_ igamma igamma_ igammac igammac_ isin.Tensor_Scalar lcm lcm_ ldexp.Tensor ldexp_ __lshift__.Scalar
    __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor __ilshift__.Scalar __ilshift__.Tensor __irshift__.Scalar
    __irshift__.Tensor _add_relu.Tensor _add_relu.Scalar angle complex polar frexp.Tensor rrelu_with_noise_backward
    nextafter nextafter_ polygamma polygamma_ mvlgamma mvlgamma_ softshrink softshrink_backward
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_xlog1py special_zeta special_zeta.other_scalar special_zeta.self_scalar xlogy.Scalar_Self
    xlogy.Scalar_Other special_xlog1py.other_scalar special_xlog1py.self_scalar rad2deg rad2deg_
    bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor bitwise_left_shift.Scalar_Tensor
    bitwise_right_shift.Scalar_Tensor)";

/// Ops with overloads n_scalar and x_scalar for numbers.
constexpr const char* kPolynomials = R"(
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w)";

std::vector<std::string> polynomials_of_numbers() {
  std::vector<std::string> names;
  for (const auto& op : aten_ops(kPolynomials)) {
    const auto name = "aten::special_" + op.substr(6);
    names.insert(names.end(), {name + ".n_scalar", name + ".x_scalar"});
  }
  return names;
}

/// Returns metas of the result and of a buffer for backward, which is as large on the CPU and empty on a GPU, from one
/// element.
std::vector<TensorMeta> log_sigmoid_metas(const OpCall& call) {
  const auto& self = call.operands[0].meta;
  auto metas = probe_output_metas(call, [](const TensorMeta& meta) { return DimVector(meta.sizes.size(), 1); });
  for (auto& meta : metas) {
    meta = numel(meta) == 1 ? TensorMeta::contiguous(self.sizes, meta.dtype) : meta;
  }
  return metas;
}

/// (self) → result and buffer, or (grad_output, self, buffer) → gradient.
Strategies log_sigmoid_strategies(const OpCall& call) {
  const auto& sizes = call.operands[0].meta.sizes;
  const auto placement = [&](const TensorMeta& meta, int64_t dim) {
    return meta.sizes == sizes ? Placement(Shard(dim)) : Placement(Replicate());
  };
  Strategies strategies;
  for (int64_t dim = 0; dim < call.operands[0].ndim(); ++dim) {
    AxisStrategy strategy;
    for (const auto& operand : call.operands) {
      strategy.operands.push_back(placement(operand.meta, dim));
    }
    for (const auto& output : call.outputs) {
      strategy.outputs.push_back(placement(output, dim));
    }
    strategies.push_back(std::move(strategy));
  }
  return strategies;
}

Strategies log_sigmoid_backward_strategies(const OpCall& call) {
  auto strategies = log_sigmoid_strategies(call);
  keep_linear(strategies, call, 0);
  return strategies;
}

/// Returns whether operands broadcast, which ATen supports although autograd never needs it.
bool is_broadcast(const OpCall& call) {
  const auto &grad = call.operands[0].meta, &self = call.operands[1].meta;
  return grad.sizes != self.sizes || grad.dtype != self.dtype;
}

const RegisterOpRules pointwise_special_rules([] {
  const OpRule rule{.strategies = [](const OpCall& call) { return pointwise_strategies(call); },
                    .output_metas = pointwise_metas,
                    .reads_float_scalars = false,
                    .needs_dry_run = true};
  register_op_rule(aten_ops(kSpecialPointwise), rule);
  register_op_rule(polynomials_of_numbers(), rule);
  auto in_place = rule;
  in_place.output_metas = like_operand(0);
  register_op_rule({"aten::conj_physical_"}, in_place);
  register_op_rule({"aten::log_sigmoid_forward"},
                   {.strategies = log_sigmoid_strategies, .output_metas = log_sigmoid_metas});
  register_op_rule({"aten::log_sigmoid_backward"}, {.strategies = log_sigmoid_backward_strategies,
                                                    .output_metas = like_operand(0),
                                                    .requires_replicated = is_broadcast});
});

}  // namespace

}  // namespace tessera
