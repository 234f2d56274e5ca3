#include "parallel/token_dispatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/shard_math.h"

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

/// Not a tensor as far as autograd is concerned.
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

std::vector<std::vector<int64_t>> gather_counts(const at::Tensor& counts, int64_t num_rows, int64_t num_experts,
                                                const DeviceMesh& mesh, const std::string& where) {
  // The last number of a record says whether the rank's counts are right.
  std::vector<int64_t> own(static_cast<size_t>(num_experts) + 1, 0);
  const auto host = counts.to(at::kCPU, at::kLong).contiguous();
  const auto* values = host.const_data_ptr<int64_t>();
  const bool right = counts.dim() == 1 && host.numel() == num_experts && !counts.is_floating_point() &&
                     std::all_of(values, values + num_experts, [](int64_t count) { return count >= 0; }) &&
                     std::accumulate(values, values + num_experts, int64_t{0}) == num_rows;
  if (right) {
    std::copy(values, values + num_experts, own.begin());
    own.back() = 1;
  }
  const auto sent = at::tensor(own, at::kLong).to(at::Device(mesh.device_type()));
  const auto received = at::empty({mesh.size() * sent.numel()}, sent.options());
  all_gather(received, sent, mesh.group());
  const auto all = received.to(at::kCPU);
  std::vector<std::vector<int64_t>> result;
  std::vector<int64_t> wrong;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const auto* first = all.const_data_ptr<int64_t>() + rank * sent.numel();
    result.emplace_back(first, first + num_experts);
    if (first[num_experts] == 0) {
      wrong.push_back(rank);
    }
  }
  TESSERA_CHECK(ValueError, wrong.empty(),
                "{}: the counts of ranks [{}] are not right; pass one integer for each of the {} experts, which add up "
                "to the number of tokens. This rank has {} tokens and counts of sizes [{}]",
                where, fmt::join(wrong, ", "), num_experts, num_rows, fmt::join(counts.sizes(), ", "));
  return result;
}

at::Tensor exchange_rows(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                         const DeviceMesh& mesh) {
  return ExchangeRows::apply(rows, c10::make_intrusive<Route>(sent, received, mesh));
}

}  // namespace tessera
