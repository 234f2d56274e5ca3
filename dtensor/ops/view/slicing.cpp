// Ops that select, place, repeat or reorder whole rows along some dims, without affecting other dims.

#include <algorithm>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// For ops of one tensor that work along the dim of argument `arg`, whose size may change.
template <size_t arg>
Strategies along_dim_argument(const OpCall& call) {
  auto strategies = along_dims(call, {wrap_dim(call.args[arg].toInt(), call.operands[0].ndim())});
  keep_partial(strategies, call);
  return strategies;
}

/// slice.Tensor keeps shards of its own dim if it selects all of it.
Strategies slice_strategies(const OpCall& call) {
  const int64_t dim = wrap_dim(call.args[1].toInt(), call.operands[0].ndim());
  const bool whole = call.outputs[0].sizes == call.operands[0].meta.sizes && call.args[4].toInt() == 1;
  auto strategies = along_dims(call, whole ? DimVector{} : DimVector{dim});
  keep_partial(strategies, call);
  return strategies;
}

/// select_backward(grad, sizes, dim, index): restores the selected dim.
int64_t unselected(const OpCall& call, int64_t dim) {
  return dim + (dim >= wrap_dim(call.args[2].toInt(), std::ssize(call.outputs[0].sizes)) ? 1 : 0);
}

Strategies flip_strategies(const OpCall& call) {
  DimVector touched;
  for (const int64_t dim : call.args[1].toIntList()) {
    touched.push_back(wrap_dim(dim, call.operands[0].ndim()));
  }
  auto strategies = along_dims(call, touched);
  keep_partial(strategies, call);
  return strategies;
}

/// Checks arguments like the kernels, which ranks without elements do not call.
std::vector<TensorMeta> flip_metas(const OpCall& call) {
  DimVector dims;
  for (const int64_t dim : call.args[1].toIntList()) {
    dims.push_back(wrap_dim(dim, call.operands[0].ndim()));
    TESSERA_CHECK(ValueError, std::count(dims.begin(), dims.end(), dims.back()) == 1,
                  "aten::flip: dim {} is there twice; each may be once", dims.back());
  }
  return like_operand(0)(call);
}

std::vector<TensorMeta> roll_metas(const OpCall& call) {
  const auto shifts = call.args[1].toIntList().size(), dims = call.args[2].toIntList().size();
  TESSERA_CHECK(ValueError, shifts == std::max<size_t>(dims, 1),
                "aten::roll: {} shifts for {} dims; one a dim is needed, or one for the flattened tensor", shifts,
                dims);
  return like_operand(0)(call);
}

/// roll without dims rolls the flattened tensor, so that every dim is affected.
Strategies roll_strategies(const OpCall& call) {
  auto strategies = along_dims(call, dims_argument(call.args[2], call.operands[0].ndim()));
  keep_partial(strategies, call);
  return strategies;
}

/// repeat(self, repeats): repeats may have more dims than self, in front.
int64_t repeated(const OpCall& call, int64_t dim) {
  const auto repeats = call.args[1].toIntVector();
  const int64_t to = dim + std::ssize(repeats) - call.operands[0].ndim();
  return repeats[static_cast<size_t>(to)] == 1 ? to : kNone;
}

/// unfold(self, dim, size, step): windows along `dim`, whose elements become a new last dim.
int64_t unfolded(const OpCall& call, int64_t dim) {
  return dim == wrap_dim(call.args[1].toInt(), call.operands[0].ndim()) ? kNone : dim;
}

/// unfold_backward(grad, input_sizes, dim, size, step): grad has one dim more than the result.
Strategies unfold_backward_strategies(const OpCall& call) {
  Strategies strategies;
  const auto ndim = static_cast<int64_t>(call.outputs[0].sizes.size());
  const int64_t along = wrap_dim(call.args[2].toInt(), ndim);
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (dim != along) {
      strategies.push_back(sharded(call, {dim}, {dim}));
    }
  }
  keep_linear(strategies, call, 0);
  return strategies;
}

std::vector<TensorMeta> unfold_backward_metas(const OpCall& call) {
  return {TensorMeta::contiguous(call.args[1].toIntVector(), call.operands[0].meta.dtype)};
}

/// constant_pad_nd(self, pad, value): pad lists (before, after) from the last dim to the first.
Strategies pad_strategies(const OpCall& call) {
  DimVector touched;
  const auto pad = call.args[1].toIntVector();
  for (size_t i = 0; i + 1 < pad.size(); i += 2) {
    if (pad[i] != 0 || pad[i + 1] != 0) {
      touched.push_back(call.operands[0].ndim() - 1 - static_cast<int64_t>(i / 2));
    }
  }
  auto strategies = along_dims(call, touched);
  if (call.args[2].toScalar().equal(0)) {
    keep_partial(strategies, call);
  }
  return strategies;
}

/// tril and triu work within the last two dims.
Strategies triangle_strategies(const OpCall& call) {
  const int64_t ndim = call.operands[0].ndim();
  auto strategies = along_dims(call, {ndim - 2, ndim - 1});
  keep_partial(strategies, call);
  return strategies;
}

/// diagonal(self, offset, dim1, dim2): removes both dims and appends the diagonal.
int64_t beside_diagonal(const OpCall& call, int64_t dim) {
  const int64_t a = wrap_dim(call.args[2].toInt(), call.operands[0].ndim());
  const int64_t b = wrap_dim(call.args[3].toInt(), call.operands[0].ndim());
  return dim == a || dim == b ? kNone : dim - (dim > a ? 1 : 0) - (dim > b ? 1 : 0);
}

/// cat(tensors, dim). Skips a tensor of sizes [0], like ATen, whatever the others' dims are.
Strategies cat_strategies(const OpCall& call) {
  Strategies strategies;
  const auto ndim = static_cast<int64_t>(call.outputs[0].sizes.size());
  const int64_t along = wrap_dim(call.args[1].toInt(), ndim);
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (dim == along) {
      continue;
    }
    DimVector operand_dims;
    for (const auto& operand : call.operands) {
      operand_dims.push_back(operand.ndim() == ndim ? dim : kNone);
    }
    strategies.push_back(sharded(call, operand_dims, {dim}));
  }
  return strategies;
}

Strategies stack_strategies(const OpCall& call) {
  Strategies strategies;
  const auto ndim = static_cast<int64_t>(call.outputs[0].sizes.size());
  const int64_t added = wrap_dim(call.args[1].toInt(), ndim);
  for (int64_t dim = 0; dim + 1 < ndim; ++dim) {
    strategies.push_back(sharded(call, DimVector(call.operands.size(), dim), {dim + (dim >= added ? 1 : 0)}));
  }
  return strategies;
}

/// Joins tensors: the result stays Partial if all operands are Partial and no dtype changes.
template <Strategies (*shards)(const OpCall&)>
Strategies join_strategies(const OpCall& call) {
  auto strategies = shards(call);
  const bool one_dtype = std::all_of(call.operands.begin(), call.operands.end(), [&](const Operand& operand) {
    return operand.meta.dtype == call.outputs[0].dtype;
  });
  if (one_dtype) {
    keep_partial(strategies, call);
  }
  return strategies;
}

const RegisterOpRules slicing_rules([] {
  register_op_rule({"aten::slice.Tensor", "aten::slice_copy.Tensor"}, {.strategies = slice_strategies});
  register_op_rule({"aten::narrow_copy"}, {.strategies = along_dim_argument<1>});
  register_op_rule({"aten::split.Tensor", "aten::split_with_sizes", "aten::unsafe_split.Tensor",
                    "aten::unsafe_split_with_sizes", "aten::split_copy.Tensor", "aten::split_with_sizes_copy"},
                   {.strategies = along_dim_argument<2>});
  register_op_rule({"aten::slice_backward"}, {.strategies = along_dim_argument<2>, .local_call = with_local_sizes(1)});
  auto select_backward = dim_map_rule(unselected);
  select_backward.local_call = with_local_sizes(1);
  register_op_rule({"aten::select_backward"}, select_backward);
  register_op_rule({"aten::unfold", "aten::unfold_copy"}, dim_map_rule(unfolded));
  register_op_rule({"aten::unfold_backward"}, {.strategies = unfold_backward_strategies,
                                               .local_call = with_local_sizes(1),
                                               .output_metas = unfold_backward_metas});
  register_op_rule({"aten::flip"}, {.strategies = flip_strategies, .output_metas = flip_metas});
  register_op_rule({"aten::roll"}, {.strategies = roll_strategies, .output_metas = roll_metas});
  register_op_rule({"aten::repeat"}, dim_map_rule(repeated));
  register_op_rule({"aten::constant_pad_nd"}, {.strategies = pad_strategies});
  register_op_rule({"aten::tril", "aten::triu", "aten::tril_", "aten::triu_"}, {.strategies = triangle_strategies});
  register_op_rule({"aten::diagonal", "aten::diagonal_copy"}, dim_map_rule(beside_diagonal));
  register_op_rule({"aten::cat"}, {.strategies = join_strategies<cat_strategies>});
  register_op_rule({"aten::stack", "aten::_stack"}, {.strategies = join_strategies<stack_strategies>});
});

}  // namespace

}  // namespace tessera
