#include "parallel/experimental/expert_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "parallel/experimental/token_dispatch.h"
#include "parallel/rank_records.h"

namespace tessera {

namespace {

/// Returns the number of experts of a module: dim 0 of its parameters.
int64_t count_experts(const ParallelStyle& style, const StyleTarget& target) {
  const auto parameters = target.module.named_parameters(/*recurse=*/false);
  TESSERA_CHECK(ValueError, !parameters.is_empty(), "{}: a {} has no parameters of its own, so no experts",
                style.describe(target), module_type_name(target.module));
  const auto& first = parameters[0];
  for (const auto& item : parameters) {
    TESSERA_CHECK(ValueError, item.value().dim() > 0 && item.value().size(0) == first.value().size(0),
                  "{}: \"{}\" is {} and \"{}\" is {}; dim 0 of every parameter counts the experts",
                  style.describe(target), first.key(), to_string(TensorMeta::of(first.value())), item.key(),
                  to_string(TensorMeta::of(item.value())));
  }
  return first.value().size(0);
}

/// Results of the forwards on all ranks.
struct Returned {
  std::vector<int64_t> wrong;  // ranks that did not return one row per token
  Record row;                  // record of a row, from the first rank that has any
};

/// State shared by the hooks of one module. Calls nest; the innermost is the last.
struct Dispatcher {
  struct Call {
    DispatchPlan plan;
    at::Tensor tokens;  // as passed to forward
  };

  std::string where;
  DeviceMesh mesh;
  int64_t num_experts;
  std::vector<Call> calls = {};

  void send(TensorRefs inputs);
  void bring_back(torch::nn::Module& experts, TensorRefs outputs);
  Returned compare_ranks(const at::Tensor& rows, bool is_right) const;
};

at::Tensor reordered(const at::Tensor& rows, const std::vector<int64_t>& order) {
  return at::index_select(rows, 0, at::tensor(order, at::kLong).to(rows.device()));
}

std::vector<int64_t> inverse(const std::vector<int64_t>& order) {
  std::vector<int64_t> result(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    result[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  }
  return result;
}

/// Returns `out`, which has no rows, with the dtype and width of other ranks' rows, and depending on `zero`.
at::Tensor without_rows(const at::Tensor& out, const Record& row, const at::Tensor& zero) {
  const std::vector<int64_t> sizes(row.begin() + kRecordSizes, row.begin() + kRecordSizes + row[0]);
  const auto dtype = static_cast<at::ScalarType>(row[1]);
  return at::zeros(sizes, out.options().dtype(dtype)) + (out.sum() + zero).to(dtype);
}

/// Returns a zero that depends on the tokens and on all parameters. Backward then runs on a rank without tokens too and
/// gives all parameters gradients: collectives over them (clipping) must find them on every rank.
at::Tensor make_zero(const at::Tensor& tokens, const torch::nn::Module& experts) {
  auto zero = tokens.sum();
  for (const auto& item : experts.named_parameters(/*recurse=*/false)) {
    if (item.value().requires_grad()) {
      const auto local = is_dtensor(item.value()) ? to_local(item.value()) : item.value();
      zero = zero + local.narrow(0, 0, 0).sum();
    }
  }
  return zero;
}

void Dispatcher::send(TensorRefs inputs) {
  TESSERA_CHECK(ValueError,
                inputs.size() == 2 && !is_dtensor(*inputs[0]) && !is_dtensor(*inputs[1]) && inputs[0]->dim() > 0,
                "{}: forward was called with {} tensors; pass two plain ones, tokens [n, ...] sorted by expert and "
                "counts [{}]",
                where, inputs.size(), num_experts);
  auto& tokens = *inputs[0];
  auto& counts = *inputs[1];
  const auto plan = plan_dispatch(gather_counts(counts, tokens, num_experts, mesh, where), mesh.local_rank());
  tokens = reordered(exchange_rows(tokens, plan.sent, plan.received, mesh), plan.order);
  counts = at::tensor(plan.counts, at::kLong).to(counts.device(), counts.scalar_type());
  calls.push_back({plan, tokens});
}

/// Compares results. A rank without tokens may run other ops than the others and return another dtype or width, such as
/// zeros_like(tokens) while the others' experts compute under autocast, but the all-to-all back needs one kind on all
/// ranks.
Returned Dispatcher::compare_ranks(const at::Tensor& rows, bool is_right) const {
  Record own{is_right ? 1 : 0, rows.size(0)};
  const auto row = row_record(rows, where);
  own.insert(own.end(), row.begin(), row.end());
  const auto records = gather_records(own, mesh);
  const auto parse_row = [](const Record& record) { return Record(record.begin() + 2, record.end()); };
  const auto has_rows = [](const Record& record) { return record[1] > 0; };
  const auto first = std::ranges::find_if(records, has_rows);
  Returned result{.wrong = {}, .row = parse_row(first == records.end() ? records[0] : *first)};
  std::vector<int64_t> other;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const auto& record = records[static_cast<size_t>(rank)];
    if (record[0] == 0) {
      result.wrong.push_back(rank);
    } else if (has_rows(record) && parse_row(record) != result.row) {
      other.push_back(rank);
    }
  }
  TESSERA_CHECK(ValueError, !result.wrong.empty() || other.empty(),
                "{}: the forwards of ranks [{}] returned rows of another dtype or other sizes than that of rank {}; "
                "return one kind on all ranks. This rank's returned {}",
                where, fmt::join(other, ", "), first - records.begin(), to_string(TensorMeta::of(rows)));
  return result;
}

void Dispatcher::bring_back(torch::nn::Module& experts, TensorRefs outputs) {
  TESSERA_CHECK(StateError, !calls.empty(), "{}: an inner call of the module threw; call it again from outside", where);
  const auto [plan, tokens] = std::move(calls.back());
  calls.pop_back();
  const bool is_right = outputs.size() == 1 && outputs[0]->dim() > 0 && outputs[0]->size(0) == tokens.size(0);
  const auto returned = compare_ranks(is_right ? *outputs[0] : tokens, is_right);
  TESSERA_CHECK(ValueError, returned.wrong.empty(),
                "{}: the forwards of ranks [{}] did not return one row a token. This rank's got {} tokens and returned "
                "{} tensors{}",
                where, fmt::join(returned.wrong, ", "), tokens.size(0), outputs.size(),
                outputs.empty() ? std::string() : ", the first " + to_string(TensorMeta::of(*outputs[0])));
  auto out = *outputs[0];
  if (tokens.size(0) == 0) {
    out = without_rows(out, returned.row, make_zero(tokens, experts));
  }
  *outputs[0] = exchange_rows(reordered(out, inverse(plan.order)), plan.received, plan.sent, mesh);
}

}  // namespace

void ExpertParallel::check(const StyleTarget& target) const {
  hook_point(target.module, describe(target));
  count_experts(*this, target);
  for (const auto& item : target.module.named_parameters(/*recurse=*/false)) {
    check_style_parameter(*this, target, target.module, item.key(), Shard(0));
  }
}

void ExpertParallel::apply(const StyleTarget& target) const {
  const auto dispatcher = std::make_shared<Dispatcher>(
      Dispatcher{.where = describe(target), .mesh = target.mesh, .num_experts = count_experts(*this, target)});
  for (const auto& item : target.module.named_parameters(/*recurse=*/false)) {
    distribute_style_parameter(*this, target, target.module, item.key(), Shard(0));
  }
  auto& point = hook_point(target.module, dispatcher->where);
  point.register_forward_pre_hook([dispatcher](HookPoint&, TensorRefs inputs) { dispatcher->send(inputs); });
  point.register_forward_hook(
      [dispatcher](HookPoint& at, TensorRefs outputs) { dispatcher->bring_back(at.module(), outputs); });
  point.register_exception_hook([dispatcher](HookPoint&) { dispatcher->calls.clear(); });
}

}  // namespace tessera
