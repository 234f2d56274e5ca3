// Matrix products, described by the names of their dims: mm is "mk,kn->mn".

#include <ATen/ExpandUtils.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"
#include "dtensor/dispatch/local_arguments.h"
#include "dtensor/ops/list_parts.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

constexpr std::string_view kLetters = "bmnk";

int64_t find_dim(std::string_view dims, char letter) {
  const auto found = dims.find(letter);
  return found == std::string_view::npos ? kNone : static_cast<int64_t>(found);
}

/// Parsed "mk,kn->mn".
struct Product {
  std::string_view a, b, out;

  static Product parse(std::string_view text) {
    const auto comma = text.find(',');
    const auto arrow = text.find("->");
    return {text.substr(0, comma), text.substr(comma + 1, arrow - comma - 1), text.substr(arrow + 2)};
  }
};

/// Strategies of a product of operands `first` and `first + 1`; operand 0 is a summand if first == 1.
Strategies matrix_product_strategies(const OpCall& call, const Product& product, size_t first) {
  Strategies strategies;
  for (const char letter : kLetters) {
    const int64_t a = find_dim(product.a, letter);
    const int64_t b = find_dim(product.b, letter);
    const int64_t out = find_dim(product.out, letter);
    if (a == kNone && b == kNone) {
      continue;
    }
    DimVector operands;
    if (first == 1) {
      operands.push_back(out == kNone ? kNone : broadcast_dim(call.operands[0].meta, call.outputs[0].sizes, out));
    }
    operands.append({a, b});
    if (out == kNone && !has_finite_numbers(call)) {
      continue;  // an infinite alpha makes infinities of terms with a finite sum
    }
    strategies.push_back(sharded(call, operands, {out}, Partial()));
    if (out == kNone && first == 1) {
      strategies.push_back(strategies.back());
      strategies.back().operands[0] = Partial();
    }
  }
  for (const size_t factor : {first, first + 1}) {
    keep_linear(strategies, call, factor);
    if (first == 1 && pending(call, 0) == pending(call, factor)) {
      keep_linear(strategies, call, factor, {0});
    }
  }
  return strategies;
}

/// Only one rank may add a replicated summand to a Partial product.
bool adds_summand(const OpPlan& plan) {
  const auto& out = *plan.outputs[0];
  const auto& summand = plan.operands[0];
  for (size_t axis = 0; axis < out.placements().size(); ++axis) {
    const bool counted_by_all =
        out.placements()[axis] == Partial() && (!summand || summand->placements()[axis].is_replicate());
    if (counted_by_all && out.mesh().coordinate()[axis] != 0) {
      return false;
    }
  }
  return true;
}

/// Replaces a factor whose shard has no elements along k by zeros of length 1, which give the same sum. Otherwise
/// kernels would return the summand unchanged, without broadcasting, and reject a beta of another dtype.
void fill_empty_factor(c10::IValue& argument, int64_t k, const DTensorSpec& spec) {
  const auto& factor = argument.toTensor();
  if (k != kNone && factor.size(k) == 0 && spec.sizes()[static_cast<size_t>(k)] != 0) {
    auto sizes = factor.sizes().vec();
    sizes[static_cast<size_t>(k)] = 1;
    argument = at::zeros(sizes, factor.options());
  }
}

/// Sets beta to 0, after the kernel has seen the beta that the first rank's kernel may reject: some read it in the
/// summand's dtype, some in the factors'.
void leave_out_summand(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& beta = local_argument(op, stack, 3);
  const auto is_taken = [&](size_t argument) {
    return is_surely_taken(beta.toScalar(), local_argument(op, stack, argument).toTensor().scalar_type());
  };
  if (!is_taken(0) || !is_taken(1)) {
    dry_run_on_size_two(op, *stack);
  }
  beta = c10::IValue(0);
}

/// Runs addmm(self, a, b, *, beta, alpha) and similar ops.
void local_sum(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan, const Product& product) {
  if (!adds_summand(plan)) {
    leave_out_summand(op, stack);
  }
  const std::array factors{product.a, product.b};
  for (size_t i = 0; i < factors.size(); ++i) {
    fill_empty_factor(local_argument(op, stack, i + 1), find_dim(factors[i], 'k'), *plan.operands[i + 1]);
  }
  op.callBoxed(stack);
}

void register_products(const std::vector<std::string>& ops, const char* text, OutputMetas metas = nullptr) {
  register_op_rule(ops, {.strategies = [product = Product::parse(text)](
                                           const OpCall& call) { return matrix_product_strategies(call, product, 0); },
                         .output_metas = std::move(metas),
                         .needs_dry_run = true});
}

/// Checks the summand, which meta kernels, and kernels of ranks without elements of the product, need not do.
Strategies product_sum_strategies(const OpCall& call, const Product& product) {
  const auto& summand = call.operands[0].meta;
  TESSERA_CHECK(ValueError, at::is_expandable_to(summand.sizes, call.outputs[0].sizes),
                "{}: the summand is {}, which does not expand to the product, {}", toString(call.op.operator_name()),
                to_string(summand), to_string(call.outputs[0]));
  return matrix_product_strategies(call, product, 1);
}

void register_sums(const std::vector<std::string>& ops, const char* text) {
  const auto product = Product::parse(text);
  register_op_rule(ops, {.strategies = [product](const OpCall& call) { return product_sum_strategies(call, product); },
                         .local_call = [product](const c10::OperatorHandle& op, torch::jit::Stack* stack,
                                                 const OpPlan& plan) { local_sum(op, stack, plan, product); },
                         .reads_float_scalars = false,
                         .needs_dry_run = true});
}

/// Checks lengths, because kernels compare only those of shards.
std::vector<TensorMeta> dot_metas(const OpCall& call) {
  const auto &a = call.operands[0].meta, &b = call.operands[1].meta;
  TESSERA_CHECK(ValueError, a.sizes.size() == 1 && a.sizes == b.sizes,
                "{}: operands {} and {}; two vectors of one length are needed", toString(call.op.operator_name()),
                to_string(a), to_string(b));
  return {TensorMeta::contiguous({}, call.operands[0].meta.dtype)};
}

/// Checks arguments, because ranks without elements of a factor do not call the kernel.
Strategies foreach_mm_strategies(const OpCall& part) {
  const auto &a = part.operands[0].meta, &b = part.operands[1].meta;
  TESSERA_CHECK(ValueError, a.dtype == b.dtype, "{}: factors {} and {}; they need one dtype",
                toString(part.op.operator_name()), to_string(a), to_string(b));
  return matrix_product_strategies(part, Product::parse("mk,kn->mn"), 0);
}

/// Skips shards without elements, which kernels for lists may reject.
void local_foreach_mm(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  const auto a = local_argument(op, stack, 0).toTensorVector(), b = local_argument(op, stack, 1).toTensorVector();
  const auto has_empty = [](const std::vector<at::Tensor>& list) {
    return std::ranges::any_of(list, [](const at::Tensor& tensor) { return tensor.numel() == 0; });
  };
  if (!has_empty(a) && !has_empty(b)) {
    op.callBoxed(stack);
    return;
  }
  std::vector<at::Tensor> products;
  for (size_t i = 0; i < a.size(); ++i) {
    products.push_back(at::mm(a[i], b[i]));
  }
  set_results(op, stack, {std::move(products)});
}

OpRule foreach_mm_rule() {
  auto rule = rule_by_parts(foreach_mm_strategies);
  rule.local_call = local_foreach_mm;
  return rule;
}

const RegisterOpRules matmul_rules([] {
  register_products({"aten::mm"}, "mk,kn->mn");
  register_products({"aten::bmm"}, "bmk,bkn->bmn");
  register_products({"aten::mv"}, "mk,k->m");
  register_products({"aten::dot", "aten::vdot"}, "k,k->", dot_metas);
  register_op_rule({"aten::_foreach_mm"}, foreach_mm_rule());
  register_sums({"aten::addmm", "aten::addmm_"}, "mk,kn->mn");
  register_sums({"aten::baddbmm", "aten::baddbmm_"}, "bmk,bkn->bmn");
  register_sums({"aten::addmv", "aten::addmv_"}, "mk,k->m");
  register_sums({"aten::addr", "aten::addr_"}, "m,n->mn");
});

}  // namespace

}  // namespace tessera
