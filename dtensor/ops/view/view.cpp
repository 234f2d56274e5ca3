// Views that change the shape, described by links between dims of operand and result.

#include <ATen/ops/squeeze.h>

#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// Input dim `in` starts at the same elements as output dim `out`.
struct DimLink {
  int64_t in;
  int64_t out;
  bool whole;  // both are the same dim; otherwise one is the leading part of the other
};

DimVector dims_longer_than_one(at::IntArrayRef sizes) {
  DimVector dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) {
      dims.push_back(static_cast<int64_t>(i));
    }
  }
  return dims;
}

/// view([6, 4] → [2, 3, 4]): {0 → 0, leading}, {1 → 2, whole}. Returns nothing for empty tensors, whose links are
/// ambiguous.
std::vector<DimLink> view_links(at::IntArrayRef in, at::IntArrayRef out) {
  std::vector<DimLink> links;
  if (c10::multiply_integers(in) == 0) {
    return links;
  }
  const auto in_dims = dims_longer_than_one(in);
  const auto out_dims = dims_longer_than_one(out);
  const auto in_size = [&](size_t i) { return in[static_cast<size_t>(in_dims[i])]; };
  const auto out_size = [&](size_t j) { return out[static_cast<size_t>(out_dims[j])]; };
  for (size_t i = 0, j = 0; i < in_dims.size() && j < out_dims.size();) {
    const size_t first_in = i, first_out = j;
    int64_t in_product = in_size(i++);
    int64_t out_product = out_size(j++);
    while (in_product != out_product) {
      if (in_product < out_product) {
        in_product *= in_size(i++);
      } else {
        out_product *= out_size(j++);
      }
    }
    links.push_back(
        {.in = in_dims[first_in], .out = out_dims[first_out], .whole = i == first_in + 1 && j == first_out + 1});
  }
  return links;
}

/// Returns whether all shards of the operand's dim begin where a whole row of the other dim does: both must be
/// divisible by the number of shards, over all axes that shard the dim.
bool shards_align(const OpCall& call, const DimLink& link) {
  const auto& spec = call.operands[0].spec;
  if (!spec || !spec->placements()[call.axis].is_shard(link.in)) {
    return false;
  }
  int64_t shards = 1;
  for (size_t axis = 0; axis < spec->placements().size(); ++axis) {
    shards *= spec->placements()[axis].is_shard(link.in) ? spec->mesh().shape()[axis] : 1;
  }
  return call.operands[0].meta.sizes[static_cast<size_t>(link.in)] % shards == 0 &&
         call.outputs[0].sizes[static_cast<size_t>(link.out)] % shards == 0;
}

Strategies view_strategies(const OpCall& call) {
  Strategies strategies;
  for (const auto& link : view_links(call.operands[0].meta.sizes, call.outputs.at(0).sizes)) {
    if (link.whole || shards_align(call, link)) {
      strategies.push_back(sharded(call, {link.in}, {link.out}));
    }
  }
  keep_partial(strategies, call);
  return strategies;
}

/// Copies if the local tensor's strides do not allow the view that the global ones do.
void local_view(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const auto local = local_argument(op, stack, 0).toTensor();
  set_results(op, stack, {local.reshape(plan.outputs[0]->local_sizes())});
}

/// Adapts the local call of a view to the op that makes a copy of it.
template <void (*local_call)(const c10::OperatorHandle&, torch::jit::Stack*, const OpPlan&)>
void local_copy(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  local_call(op, stack, plan);
  stack->back() = stack->back().toTensor().clone(at::MemoryFormat::Contiguous);
}

int64_t transposed(const OpCall& call, int64_t dim) {
  const int64_t ndim = call.operands[0].ndim();
  const int64_t a = wrap_dim(call.args[1].toInt(), ndim);
  const int64_t b = wrap_dim(call.args[2].toInt(), ndim);
  return dim == a ? b : dim == b ? a : dim;
}

int64_t permuted(const OpCall& call, int64_t dim) {
  const auto order = call.args[1].toIntVector();
  for (size_t to = 0; to < order.size(); ++to) {
    if (wrap_dim(order[to], call.operands[0].ndim()) == dim) {
      return static_cast<int64_t>(to);
    }
  }
  return kNone;
}

int64_t unsqueezed(const OpCall& call, int64_t dim) {
  return dim + (dim >= wrap_dim(call.args[1].toInt(), call.operands[0].ndim() + 1) ? 1 : 0);
}

/// select.int and unbind.int: remove the dim of argument `arg`.
template <size_t arg>
int64_t without_dim(const OpCall& call, int64_t dim) {
  const int64_t gone = wrap_dim(call.args[arg].toInt(), call.operands[0].ndim());
  return dim == gone ? kNone : dim - (dim > gone ? 1 : 0);
}

/// Returns the dims that squeeze(), squeeze.dim and squeeze.dims remove: the requested ones of global size 1.
DimVector squeezed_dims(at::IntArrayRef sizes, const c10::IValue* dims) {
  DimVector result;
  if (dims && dims->isIntList() && dims->toIntList().empty()) {
    return result;
  }
  for (const int64_t dim : dims_argument(dims ? *dims : c10::IValue(), static_cast<int64_t>(sizes.size()))) {
    if (dim < static_cast<int64_t>(sizes.size()) && sizes[static_cast<size_t>(dim)] == 1) {
      result.push_back(dim);
    }
  }
  return result;
}

int64_t squeezed(const OpCall& call, int64_t dim) {
  const auto gone = squeezed_dims(call.operands[0].meta.sizes, call.args.size() > 1 ? &call.args[1] : nullptr);
  if (contains(gone, dim)) {
    return kNone;
  }
  return dim - std::count_if(gone.begin(), gone.end(), [&](int64_t other) { return other < dim; });
}

/// Removes only dims of global size 1, because a local dim may have size 1 by sharding.
void local_squeeze(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  const bool has_dims = op.schema().arguments().size() > 1;
  const auto gone = squeezed_dims(plan.operands[0]->sizes(), has_dims ? &local_argument(op, stack, 1) : nullptr);
  const auto local = local_argument(op, stack, 0).toTensor();
  set_results(op, stack, {at::squeeze(local, gone)});
}

/// expand: keeps dims that keep their size; expanded dims come from a replicated operand.
int64_t expanded(const OpCall& call, int64_t dim) {
  const auto& out = call.outputs[0].sizes;
  const int64_t to = dim + static_cast<int64_t>(out.size()) - call.operands[0].ndim();
  return call.operands[0].meta.sizes[static_cast<size_t>(dim)] == out[static_cast<size_t>(to)] ? to : kNone;
}

int64_t transposed_2d(const OpCall& call, int64_t dim) {
  return call.operands[0].ndim() < 2 ? dim : 1 - dim;
}

/// view_as_real and view_as_complex: the last dim of the real tensor has both parts. Their sums are those of the
/// complex numbers, but not their products and extrema.
Strategies complex_parts_strategies(const OpCall& call) {
  const auto leading = [](const OpCall& call, int64_t dim) {
    return dim < std::ssize(call.outputs[0].sizes) ? dim : kNone;
  };
  auto strategies = map_dims(call, leading);
  keep_linear(strategies, call, 0);
  return strategies;
}

const RegisterOpRules view_rules([] {
  register_op_rule({"aten::view", "aten::_unsafe_view", "aten::_reshape_alias"},
                   {.strategies = view_strategies, .local_call = local_view});
  register_op_rule({"aten::view_copy"}, {.strategies = view_strategies, .local_call = local_copy<local_view>});
  register_op_rule({"aten::t", "aten::t_copy"}, dim_map_rule(transposed_2d));
  register_op_rule({"aten::transpose.int", "aten::transpose_copy.int"}, dim_map_rule(transposed));
  register_op_rule({"aten::permute", "aten::permute_copy"}, dim_map_rule(permuted));
  register_op_rule({"aten::unsqueeze", "aten::unsqueeze_copy"}, dim_map_rule(unsqueezed));
  register_op_rule({"aten::select.int", "aten::select_copy.int"}, dim_map_rule(without_dim<1>));
  register_op_rule({"aten::unbind.int", "aten::unbind_copy.int"}, dim_map_rule(without_dim<1>));
  register_op_rule(
      {"aten::view_as_real", "aten::view_as_real_copy", "aten::view_as_complex", "aten::view_as_complex_copy"},
      {.strategies = complex_parts_strategies});
  auto squeeze = dim_map_rule(squeezed);
  squeeze.local_call = local_squeeze;
  register_op_rule({"aten::squeeze", "aten::squeeze.dim", "aten::squeeze.dims"}, squeeze);
  squeeze.local_call = local_copy<local_squeeze>;
  register_op_rule({"aten::squeeze_copy", "aten::squeeze_copy.dim", "aten::squeeze_copy.dims"}, squeeze);
  auto expand = dim_map_rule(expanded);
  expand.local_call = with_local_sizes(1);
  register_op_rule({"aten::expand", "aten::expand_copy"}, expand);
});

}  // namespace

}  // namespace tessera
