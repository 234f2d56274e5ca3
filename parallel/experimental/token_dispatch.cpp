#include "parallel/experimental/token_dispatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/spec/dtensor_spec.h"
#include "dtensor/spec/shard_math.h"
#include "parallel/rank_records.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

at::Tensor send_rows(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                     const ProcessGroupPtr& group) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto sizes = rows.sizes().vec();
  sizes[0] = sum(received);
  auto result = at::empty(sizes, rows.options());
  all_to_all(result, rows.contiguous(), received, sent, group);
  return result;
}

/// Route of tokens, which autograd does not treat as a tensor.
struct Route : torch::CustomClassHolder {
  Route(std::vector<int64_t> sent, std::vector<int64_t> received, DeviceMesh mesh)
      : sent(std::move(sent)), received(std::move(received)), mesh(std::move(mesh)) {}

  std::vector<int64_t> sent, received;
  DeviceMesh mesh;
};

class ExchangeRows : public torch::autograd::Function<ExchangeRows> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const c10::intrusive_ptr<Route>& route) {
    context->saved_data["route"] = c10::IValue::make_capsule(route);
    return send_rows(rows, route->sent, route->received, route->mesh.group());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["route"].toCapsule();
    const auto& route = static_cast<const Route&>(*capsule);
    return {exchange_rows(grads[0], route.received, route.sent, route.mesh), at::Tensor()};
  }
};

/// Returns the counts if there is one per expert and they add up to the number of rows.
std::optional<std::vector<int64_t>> right_counts(const at::Tensor& counts, int64_t num_rows, int64_t num_experts) {
  const bool is_integer = counts.scalar_type() == at::kInt || counts.scalar_type() == at::kLong;
  if (!is_integer || counts.dim() != 1 || counts.size(0) != num_experts) {
    return std::nullopt;
  }
  const auto host = counts.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> values(host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + num_experts);
  const bool adds_up = std::ranges::all_of(values, [](int64_t count) { return count >= 0; }) && sum(values) == num_rows;
  return adds_up ? std::make_optional(std::move(values)) : std::nullopt;
}

}  // namespace

DispatchPlan plan_dispatch(const std::vector<std::vector<int64_t>>& counts, int64_t rank) {
  const auto ranks = static_cast<int64_t>(counts.size());
  const auto num_experts = static_cast<int64_t>(counts[0].size());
  const auto rows_for = [&](const std::vector<int64_t>& row, int64_t peer) {
    const auto range = chunk_range(num_experts, ranks, peer);
    return std::vector<int64_t>(row.begin() + range.offset, row.begin() + range.offset + range.length);
  };
  DispatchPlan plan;
  std::vector<std::vector<int64_t>> got;  // [rank][own expert]
  for (int64_t peer = 0; peer < ranks; ++peer) {
    plan.sent.push_back(sum(rows_for(counts[static_cast<size_t>(rank)], peer)));
    got.push_back(rows_for(counts[static_cast<size_t>(peer)], rank));
    plan.received.push_back(sum(got.back()));
    const auto rows_of_all = [&](int64_t total, const auto& row) { return total + sum(rows_for(row, peer)); };
    plan.some_get_none |= std::accumulate(counts.begin(), counts.end(), int64_t{0}, rows_of_all) == 0;
  }
  const size_t own_experts = got[0].size();
  for (size_t expert = 0; expert < own_experts; ++expert) {
    plan.counts.push_back(0);
    int64_t first = 0;
    for (const auto& from : got) {
      const int64_t begin = std::accumulate(from.begin(), from.begin() + static_cast<int64_t>(expert), first);
      for (int64_t i = 0; i < from[expert]; ++i) {
        plan.order.push_back(begin + i);
      }
      plan.counts.back() += from[expert];
      first += sum(from);
    }
  }
  return plan;
}

std::vector<std::vector<int64_t>> gather_counts(const at::Tensor& counts, const at::Tensor& tokens, int64_t num_experts,
                                                const DeviceMesh& mesh, const std::string& where) {
  // Record: whether the rank's counts are valid, the counts, and a token's dtype and sizes.
  const auto own_counts = right_counts(counts, tokens.size(0), num_experts);
  Record own{own_counts ? 1 : 0};
  const auto told = own_counts.value_or(Record(static_cast<size_t>(num_experts), 0));
  own.insert(own.end(), told.begin(), told.end());
  const auto token = row_record(tokens, where);
  own.insert(own.end(), token.begin(), token.end());

  const auto records = gather_records(own, mesh);
  std::vector<std::vector<int64_t>> result;
  std::vector<size_t> wrong, other;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const auto& record = records[rank];
    const auto token_begin = [&](const Record& of) { return of.begin() + 1 + num_experts; };
    result.emplace_back(record.begin() + 1, token_begin(record));
    if (record[0] == 0) {
      wrong.push_back(rank);
    }
    if (!std::equal(token_begin(record), record.end(), token_begin(records[0]))) {
      other.push_back(rank);
    }
  }
  TESSERA_CHECK(ValueError, wrong.empty(),
                "{}: the counts of ranks [{}] are not right; pass one integer (int32 or int64) for each of the {} "
                "experts, which add up to the number of tokens. This rank has {} tokens and counts {}",
                where, fmt::join(wrong, ", "), num_experts, tokens.size(0), to_string(TensorMeta::of(counts)));
  TESSERA_CHECK(ValueError, other.empty(),
                "{}: the tokens of ranks [{}] have another dtype or other sizes behind the rows than those of rank 0; "
                "pass the same kind on all ranks, also on one that has none. This rank's are {}",
                where, fmt::join(other, ", "), to_string(TensorMeta::of(tokens)));
  return result;
}

at::Tensor exchange_rows(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                         const DeviceMesh& mesh) {
  return ExchangeRows::apply(rows, c10::make_intrusive<Route>(sent, received, mesh));
}

}  // namespace tessera
