#include "dtensor/ops/matmul/sharded_attention.h"

#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"

namespace tessera {

namespace {

constexpr int64_t kDims = 4;
constexpr int64_t kHeads = 1;

bool has_mask(const std::optional<at::Tensor>& mask) {
  return mask && mask->defined();
}

/// Query, key and value, with names for messages.
struct Operands {
  const at::Tensor& query;
  const at::Tensor& key;
  const at::Tensor& value;

  bool have_as_many(int64_t dim) const {
    return query.size(dim) == key.size(dim) && query.size(dim) == value.size(dim);
  }
};

bool is_sharded_on(const Placement& placement, int64_t dim, const Operands& operands) {
  return placement.is_shard(dim) && operands.have_as_many(dim);
}

bool stays(const Placement& placement, const Operands& operands) {
  return is_sharded_on(placement, 0, operands) || is_sharded_on(placement, kHeads, operands);
}

/// Returns the placements of the first operand with such a sharding, which the others follow.
Placements common_placements(const Operands& operands) {
  Placements common(placements(operands.query).size(), Replicate());
  for (const auto* operand : {&operands.query, &operands.key, &operands.value}) {
    const auto& own = placements(*operand);
    if (std::ranges::any_of(own, [&](const Placement& placement) { return stays(placement, operands); })) {
      for (size_t axis = 0; axis < own.size(); ++axis) {
        common[axis] = stays(own[axis], operands) ? own[axis] : Replicate();
      }
      break;
    }
  }
  return normalized(common, kDims, static_cast<int64_t>(common.size()), "scaled_dot_product_attention");
}

/// Returns the mask's placements. Its dims count from the last; it may lack batch and heads, or have size 1.
Placements mask_placements(const at::Tensor& mask, const at::Tensor& query, const Placements& common) {
  Placements own(common.size(), Replicate());
  for (size_t axis = 0; axis < common.size(); ++axis) {
    const int64_t dim = common[axis].is_shard() ? common[axis].dim() + mask.dim() - kDims : -1;
    if (dim >= 0 && mask.size(dim) == query.size(common[axis].dim())) {
      own[axis] = Shard(dim, common[axis].order());
    }
  }
  return normalized(own, mask.dim(), static_cast<int64_t>(own.size()), "scaled_dot_product_attention");
}

/// Returns Partial where ranks share a replicated mask but have different items, so that each has a term of its
/// gradient.
Placements gradient_placements(const Placements& own, const Placements& common) {
  Placements gradient = own;
  for (size_t axis = 0; axis < own.size(); ++axis) {
    if (own[axis].is_replicate() && common[axis].is_shard()) {
      gradient[axis] = Partial();
    }
  }
  return gradient;
}

void check_move_allowed(const char* role, const at::Tensor& tensor, const Placements& to) {
  const auto steps = plan_redistribute(placements(tensor), to);
  TESSERA_CHECK(StateError, !ExplicitRedistribution::forbids(steps, device_mesh(tensor)),
                "aten::scaled_dot_product_attention would redistribute its {}, {}, to {} ({}), which "
                "ExplicitRedistribution forbids. Call redistribute() on it first",
                role, dtensor_spec(tensor)->to_string(), to_string(to), to_string(steps));
}

at::Tensor move_to_local(const char* role, const at::Tensor& tensor, const Placements& own, const Placements& common) {
  check_move_allowed(role, tensor, own);
  return to_local(redistribute(tensor, own), gradient_placements(own, common));
}

/// Handles empty inputs, because fused kernels divide by the number of items.
at::Tensor compute_local_attention(const Operands& local, const std::optional<at::Tensor>& mask,
                                   const AttentionOptions& options) {
  const auto result = local.query.numel() == 0 || local.key.numel() == 0
                          ? std::get<0>(at::_scaled_dot_product_attention_math(local.query, local.key, local.value,
                                                                               mask, 0.0, options.is_causal, {},
                                                                               options.scale, options.enable_gqa))
                          : at::scaled_dot_product_attention(local.query, local.key, local.value, mask, 0.0,
                                                             options.is_causal, options.scale, options.enable_gqa);
  return result.transpose(1, 2).contiguous().transpose(1, 2);
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa) {
  const bool is_empty = query.numel() == 0 || key.numel() == 0;  // ATen would return plain zeros
  if (query.device().is_cpu() && !is_empty) {
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  }
  if (is_empty || dropout_p != 0 || !can_shard_attention(query, key, value, mask)) {
    // Uses ops with rules, which draw the same numbers for all layouts and reject invalid arguments.
    return std::get<0>(
        at::_scaled_dot_product_attention_math(query, key, value, mask, dropout_p, is_causal, {}, scale, enable_gqa));
  }
  return sharded_attention(query, key, value, mask, {.is_causal = is_causal, .scale = scale, .enable_gqa = enable_gqa});
}

}  // namespace

bool can_shard_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask) {
  const auto fits = [&](const at::Tensor& tensor) {
    return is_dtensor(query) && is_dtensor(tensor) && device_mesh(tensor) == device_mesh(query);
  };
  const auto has_items = [&](const at::Tensor& tensor) {
    return fits(tensor) && tensor.dim() == kDims && tensor.size(0) == query.size(0);
  };
  return has_items(query) && has_items(key) && has_items(value) &&
         (!has_mask(mask) || (fits(*mask) && mask->dim() <= kDims));
}

at::Tensor sharded_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const std::optional<at::Tensor>& mask, const AttentionOptions& options) {
  TESSERA_ASSERT(can_shard_attention(query, key, value, mask), "attention of {} that does not fit", query.dim());
  const auto common = common_placements({query, key, value});
  std::optional<at::Tensor> local_mask;
  if (has_mask(mask)) {
    local_mask = move_to_local("mask", *mask, mask_placements(*mask, query, common), common);
  }
  const auto local_query = move_to_local("query", query, common, common),
             local_key = move_to_local("key", key, common, common),
             local_value = move_to_local("value", value, common, common);
  const auto local = compute_local_attention({local_query, local_key, local_value}, local_mask, options);
  const int64_t items = query.size(0), heads = query.size(kHeads), length = query.size(2), width = value.size(3);
  return from_local(local, device_mesh(query), common,
                    {.shape = std::vector{items, heads, length, width},
                     .stride = std::vector{length * heads * width, width, heads * width, int64_t{1}}});
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("scaled_dot_product_attention", &scaled_dot_product_attention);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", &scaled_dot_product_attention);
}

}  // namespace tessera
