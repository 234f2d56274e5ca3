// Embeddings: the batch may be sharded, or the table by columns or rows.

#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// embedding(weight [V, C], indices): with a table sharded by rows, one rank has each index's row and the others zeros,
/// a Partial sum.
Strategies embedding_strategies(const OpCall& call) {
  Strategies strategies;
  const int64_t index_dims = call.operands[1].ndim();
  for (int64_t dim = 0; dim < index_dims; ++dim) {
    strategies.push_back(sharded(call, {kNone, dim}, {dim}));
  }
  strategies.push_back(sharded(call, {1, kNone}, {index_dims}));
  strategies.push_back(sharded(call, {0, kNone}, {kNone}, Partial()));
  return strategies;
}

std::vector<TensorMeta> embedding_metas(const OpCall& call) {
  const auto &table = call.operands[0].meta, &indices = call.operands[1].meta;
  TESSERA_CHECK(ValueError, table.sizes.size() == 2 && (indices.dtype == at::kLong || indices.dtype == at::kInt),
                "aten::embedding: weight {} and indices {}; a matrix, and indices of Long or Int are needed",
                to_string(table), to_string(indices));
  auto sizes = call.operands[1].meta.sizes;
  sizes.push_back(call.operands[0].meta.sizes.back());
  return {TensorMeta::contiguous(sizes, call.operands[0].meta.dtype)};
}

/// Looks up the indices of this rank's rows. Indices outside the full table become -1, so that the kernel rejects them
/// as for a plain tensor, on every rank, even without columns, where it looks up nothing.
void local_embedding(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan) {
  auto weight = local_argument(op, stack, 0).toTensor();
  const auto indices = local_argument(op, stack, 1).toTensor();
  if (!plan.outputs[0]->has_partial()) {
    if (weight.size(1) == 0) {
      static_cast<void>(at::embedding(weight.new_zeros({1}).expand({weight.size(0), 1}), indices));
    }
    op.callBoxed(stack);
    return;
  }
  const auto& table = plan.operands[0];
  const auto range = local_range(table, 0);
  if (range.length == 0) {
    weight = at::zeros({1, weight.size(1)}, weight.options());
  }
  const auto invalid = indices.lt(0).logical_or_(indices.ge(table->sizes()[0]));
  const auto elsewhere = indices.lt(range.offset).logical_or_(indices.ge(range.offset + range.length));
  auto rows = at::embedding(weight, indices.sub(range.offset).masked_fill_(elsewhere, 0).masked_fill_(invalid, -1));
  set_results(op, stack, {rows.masked_fill_(elsewhere.unsqueeze(-1), 0)});
}

/// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq): scaling needs the counts of
/// all indices, so the batch is then not sharded.
Strategies embedding_backward_strategies(const OpCall& call) {
  Strategies strategies;
  const int64_t index_dims = call.operands[1].ndim();
  if (!call.args[4].toBool()) {
    for (int64_t dim = 0; dim < index_dims; ++dim) {
      strategies.push_back(sharded(call, {dim, dim}, {kNone}, Partial()));
    }
  }
  strategies.push_back(sharded(call, {index_dims, kNone}, {1}));
  keep_linear(strategies, call, 0);
  return strategies;
}

std::vector<TensorMeta> embedding_backward_metas(const OpCall& call) {
  const auto& grad = call.operands[0].meta;
  return {TensorMeta::contiguous({call.args[2].toInt(), grad.sizes.back()}, grad.dtype)};
}

const RegisterOpRules embedding_rules([] {
  register_op_rule({"aten::embedding"}, {.strategies = embedding_strategies,
                                         .local_call = local_embedding,
                                         .output_metas = embedding_metas,
                                         .runs_on_empty_shards = true});
  register_op_rule({"aten::embedding_dense_backward"},
                   {.strategies = embedding_backward_strategies, .output_metas = embedding_backward_metas});
});

}  // namespace

}  // namespace tessera
