// Reads and writes with index tensors.

#include <ATen/ExpandUtils.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

/// x[indices] with a list of index tensors and Nones: the broadcast dims of the indices replace the indexed dims of x,
/// at the position of the first if they are adjacent, otherwise in front.
struct AdvancedIndex {
  DimVector indexed;  // dims of x
  DimVector broadcast;
  int64_t place = 0;  // position of `broadcast` in the result
  int64_t ndim = 0;   // of x

  explicit AdvancedIndex(const OpCall& call) : ndim(call.operands[0].ndim()) {
    int64_t dim = 0;
    for (const c10::IValue& entry : call.args[1].toListRef()) {
      if (entry.isTensor() && entry.toTensor().defined()) {
        indexed.push_back(dim);
      }
      ++dim;
    }
    for (size_t i = 0; i < indexed.size(); ++i) {
      const auto sizes = at::infer_size_dimvector(broadcast, call.operands[i + 1].meta.sizes);
      broadcast.assign(sizes.begin(), sizes.end());
    }
    const bool neighbours = indexed.empty() || indexed.back() - indexed.front() + 1 == std::ssize(indexed);
    place = neighbours && !indexed.empty() ? indexed.front() : 0;
  }

  int64_t result_ndim() const { return ndim - std::ssize(indexed) + std::ssize(broadcast); }

  /// Returns the position in the result of a dim of x that is not indexed.
  int64_t result_dim(int64_t dim) const {
    const auto kept_before = dim - std::count_if(indexed.begin(), indexed.end(), [&](int64_t d) { return d < dim; });
    return kept_before < place ? kept_before : kept_before + std::ssize(broadcast);
  }
};

Strategies index_strategies(const OpCall& call) {
  Strategies strategies;
  const AdvancedIndex index(call);
  for (int64_t dim = 0; dim < index.ndim; ++dim) {
    if (!contains(index.indexed, dim)) {
      DimVector operands(call.operands.size(), kNone);
      operands[0] = dim;
      strategies.push_back(sharded(call, operands, {index.result_dim(dim)}));
    }
  }
  for (int64_t k = 0; k < std::ssize(index.broadcast); ++k) {
    DimVector operands(1, kNone);
    for (size_t i = 1; i < call.operands.size(); ++i) {
      operands.push_back(broadcast_dim(call.operands[i].meta, index.broadcast, k));
    }
    strategies.push_back(sharded(call, operands, {index.place + k}));
  }
  return strategies;
}

/// index_put(self, indices, values, ...): self and values may be sharded along a dim that is not indexed.
Strategies index_put_strategies(const OpCall& call) {
  Strategies strategies;
  const AdvancedIndex index(call);
  for (int64_t dim = 0; dim < index.ndim; ++dim) {
    if (!contains(index.indexed, dim)) {
      DimVector operands(call.operands.size(), kNone);
      operands.front() = dim;
      operands.back() = broadcast_dim(call.operands.back().meta, index.result_ndim(), index.result_dim(dim),
                                      call.operands[0].meta.sizes[static_cast<size_t>(dim)]);
      strategies.push_back(sharded(call, operands, {dim}));
    }
  }
  return strategies;
}

/// Returns the sizes of x[indices].
DimVector result_sizes(const OpCall& call, const AdvancedIndex& index) {
  DimVector sizes;
  for (int64_t dim = 0; dim < index.ndim; ++dim) {
    if (!contains(index.indexed, dim)) {
      sizes.push_back(call.operands[0].meta.sizes[static_cast<size_t>(dim)]);
    }
  }
  sizes.insert(sizes.begin() + index.place, index.broadcast.begin(), index.broadcast.end());
  return sizes;
}

/// Returns whether an index is a mask, which selects as many elements as it has true ones.
bool has_mask_index(const OpCall& call) {
  return std::any_of(call.operands.begin(), call.operands.end(), [](const Operand& operand) {
    return operand.arg == 1 && (operand.meta.dtype == at::kBool || operand.meta.dtype == at::kByte);
  });
}

/// ATen's meta kernel does not check the sizes of values, and its other kernels see only those of shards.
std::vector<TensorMeta> index_put_metas(const OpCall& call) {
  if (!has_mask_index(call)) {
    const auto sizes = result_sizes(call, AdvancedIndex(call));
    const auto& values = call.operands.back().meta;
    TESSERA_CHECK(ValueError, at::is_expandable_to(values.sizes, sizes),
                  "{}: values {} do not broadcast to [{}], the sizes of what is indexed",
                  toString(call.op.operator_name()), to_string(values), fmt::join(sizes, ", "));
  }
  return infer_output_metas(call);
}

/// gather, scatter: row by row along the dim of argument 1, if all tensors have the other dims in full.
Strategies row_wise_strategies(const OpCall& call) {
  return along_dims(call, {wrap_dim(call.args[1].toInt(), call.operands[0].ndim())});
}

Strategies gather_strategies(const OpCall& call) {
  auto strategies = row_wise_strategies(call);
  const int64_t dim = wrap_dim(call.args[1].toInt(), call.operands[0].ndim());
  if (call.operands[1].ndim() > 0) {
    strategies.push_back(sharded(call, {kNone, dim}, {dim}));
  }
  return strategies;
}

/// index_add(self, dim, index, source) and similar ops: self and source have equal sizes except in `dim`.
Strategies index_rows_strategies(const OpCall& call) {
  Strategies strategies;
  const int64_t along = wrap_dim(call.args[1].toInt(), call.operands[0].ndim());
  for (int64_t dim = 0; dim < call.operands[0].ndim(); ++dim) {
    if (dim != along) {
      DimVector operands{dim, kNone};
      if (call.operands.size() > 2) {
        operands.push_back(call.operands[2].ndim() == call.operands[0].ndim() ? dim : kNone);
      }
      strategies.push_back(sharded(call, operands, {dim}));
    }
  }
  return strategies;
}

Strategies index_select_strategies(const OpCall& call) {
  auto strategies = index_rows_strategies(call);
  if (call.operands[0].ndim() > 0 && call.operands[1].ndim() > 0) {
    strategies.push_back(sharded(call, {kNone, 0}, {wrap_dim(call.args[1].toInt(), call.operands[0].ndim())}));
  }
  return strategies;
}

std::vector<TensorMeta> index_select_metas(const OpCall& call) {
  auto sizes = call.operands[0].meta.sizes;
  const auto& index = call.operands[1].meta;
  TESSERA_CHECK(ValueError, index.sizes.size() <= 1 && (index.dtype == at::kLong || index.dtype == at::kInt),
                "aten::index_select: index {}; a vector of Long or Int is needed", to_string(index));
  if (!sizes.empty()) {
    sizes[static_cast<size_t>(wrap_dim(call.args[1].toInt(), std::ssize(sizes)))] = numel(call.operands[1].meta);
  }
  return {TensorMeta::contiguous(sizes, call.operands[0].meta.dtype)};
}

/// Throws for arguments that ATen's kernel rejects with an empty index.
void check_adds_nothing(const OpCall& call) {
  const auto& self = call.operands[0].meta;
  const auto& index = call.operands[1].meta;
  const auto& source = call.operands[2].meta;
  TESSERA_CHECK(ValueError, index.sizes.size() <= 1 && (index.dtype == at::kLong || index.dtype == at::kInt),
                "aten::index_add: index {}; a vector of Long or Int is needed", to_string(index));
  TESSERA_CHECK(ValueError, self.dtype == source.dtype,
                "aten::index_add: self {} and source {}; cast one, they need one dtype", to_string(self),
                to_string(source));
  auto rows = self.sizes;
  if (!rows.empty()) {
    rows[static_cast<size_t>(wrap_dim(call.args[1].toInt(), std::ssize(rows)))] = 0;
  }
  TESSERA_CHECK(ValueError, !rows.empty() && source.sizes == rows,
                "aten::index_add: no indices for rows along dim {} of source {}, to add to self {}; source needs the "
                "sizes of self, and none along the dim",
                call.args[1].toInt(), to_string(source), to_string(self));
}

/// Avoids ATen's meta kernel, which examines a row of the source even if there is none.
std::vector<TensorMeta> index_add_metas(const OpCall& call) {
  if (numel(call.operands[1].meta) > 0) {
    return infer_output_metas(call);
  }
  check_adds_nothing(call);
  const auto& self = call.operands[0].meta;
  const bool is_in_place = call.operands[0].written;
  return {is_in_place ? self : TensorMeta::contiguous(self.sizes, self.dtype)};
}

const RegisterOpRules indexing_rules([] {
  register_op_rule({"aten::index.Tensor", "aten::_unsafe_index.Tensor"},
                   {.strategies = index_strategies, .requires_replicated = has_mask_index});
  register_op_rule(
      {"aten::index_put", "aten::index_put_", "aten::_unsafe_index_put", "aten::_index_put_impl_"},
      {.strategies = index_put_strategies, .output_metas = index_put_metas, .requires_replicated = has_mask_index});
  register_op_rule({"aten::gather"}, {.strategies = gather_strategies});
  register_op_rule(
      {"aten::scatter.src", "aten::scatter.value", "aten::scatter.reduce", "aten::scatter.value_reduce",
       "aten::scatter_.src", "aten::scatter_.value", "aten::scatter_.reduce", "aten::scatter_.value_reduce",
       "aten::scatter_add", "aten::scatter_add_", "aten::scatter_reduce.two", "aten::scatter_reduce_.two"},
      {.strategies = row_wise_strategies});
  register_op_rule({"aten::index_copy", "aten::index_copy_", "aten::index_fill.int_Scalar",
                    "aten::index_fill_.int_Scalar", "aten::index_fill.int_Tensor", "aten::index_fill_.int_Tensor"},
                   {.strategies = index_rows_strategies});
  register_op_rule({"aten::index_add", "aten::index_add_"},
                   {.strategies = index_rows_strategies, .output_metas = index_add_metas});
  register_op_rule({"aten::index_select"}, {.strategies = index_select_strategies, .output_metas = index_select_metas});
});

}  // namespace

}  // namespace tessera
