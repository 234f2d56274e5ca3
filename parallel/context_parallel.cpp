#include "parallel/context_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/strides.h>

#include "base/error.h"
#include "dtensor/shard_math.h"

namespace tessera {

namespace {

// Of [batch, heads, length, head_dim].
constexpr int64_t kHeads = 1;
constexpr int64_t kLength = 2;
constexpr int64_t kHeadDim = 3;

void check_tensor(const at::Tensor& tensor, const char* name, const DeviceMesh& mesh) {
  const auto& spec = dtensor_spec(tensor);
  TESSERA_CHECK(ValueError, spec->ndim() == 4 && spec->mesh() == mesh,
                "context_parallel_attention: {} is {}; all three must be [batch, heads, length, head_dim] on one mesh",
                name, spec->to_string());
}

void check_query(const at::Tensor& query, const at::Tensor& key) {
  const auto& spec = dtensor_spec(query);
  for (size_t axis = 0; axis < spec->placements().size(); ++axis) {
    const auto& placement = spec->placements()[axis];
    TESSERA_CHECK(ValueError, !placement.is_shard(kHeadDim),
                  "context_parallel_attention: the query is {}; batch, heads and length may be cut, head_dim may not",
                  spec->to_string());
    const int64_t ranks = spec->mesh().size(static_cast<int64_t>(axis));
    const bool whole_groups = query.size(kHeads) % ranks == 0 && key.size(kHeads) % ranks == 0;
    TESSERA_CHECK(
        NotImplementedError, !placement.is_shard(kHeads) || query.size(kHeads) == key.size(kHeads) || whole_groups,
        "context_parallel_attention: {} query heads and {} key heads cut over {} ranks, which splits a group; "
        "repeat keys and values for each query head, or replicate the heads",
        query.size(kHeads), key.size(kHeads), ranks);
  }
}

/// `placements` with `replacement` for the cuts of the length.
Placements with_length(Placements placements, const Placement& replacement) {
  for (auto& placement : placements) {
    placement = placement.is_shard(kLength) ? replacement : placement;
  }
  return placements;
}

/// Of one rank's queries. The keys that none of them may see are left out.
at::Tensor local_attention(const at::Tensor& query, at::Tensor key, at::Tensor value, int64_t first_query,
                           const ContextAttentionOptions& options) {
  if (query.numel() == 0) {
    // Kernels divide by the number of queries; gradients of the keys must exist on every rank, zeros as they are.
    const auto repeat = query.size(kHeads) / std::max<int64_t>(key.size(kHeads), 1);
    return query.matmul(key.repeat_interleave(repeat, kHeads).transpose(2, 3))
        .matmul(value.repeat_interleave(repeat, kHeads));
  }
  std::optional<at::Tensor> mask;
  if (options.is_causal) {
    const int64_t visible = std::min(key.size(kLength), first_query + query.size(kLength));
    key = key.narrow(kLength, 0, visible);
    value = value.narrow(kLength, 0, visible);
    const auto positions = at::TensorOptions().dtype(at::kLong).device(query.device());
    const auto queries = at::arange(first_query, first_query + query.size(kLength), positions).unsqueeze(1);
    mask = queries.ge(at::arange(visible, positions));
  }
  return at::scaled_dot_product_attention(query, key, value, mask, /*dropout_p=*/0.0, /*is_causal=*/false,
                                          options.scale, options.enable_gqa);
}

}  // namespace

at::Tensor context_parallel_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                      ContextAttentionOptions options) {
  const auto& mesh = device_mesh(query);
  check_tensor(query, "the query", mesh);
  check_tensor(key, "the key", mesh);
  check_tensor(value, "the value", mesh);
  check_query(query, key);

  const auto placed = gradient_placements(placements(query));
  const auto whole = with_length(placed, Replicate());
  const auto terms = with_length(placed, Partial());
  auto all_keys = redistribute_async(key, whole);
  auto all_values = redistribute_async(value, whole);
  const auto own_query = redistribute(query, placed);
  const auto& spec = dtensor_spec(own_query);
  const int64_t first_query = local_range(query.size(kLength), kLength, placed, spec->position()).offset;
  const auto own_keys = to_local(all_keys.wait(), terms);
  const auto own_values = to_local(all_values.wait(), terms);
  const auto out = local_attention(to_local(own_query), own_keys, own_values, first_query, options);

  auto shape = query.sizes().vec();
  shape.back() = value.size(kHeadDim);
  const auto strides = c10::contiguous_strides(shape);
  return from_local(out.contiguous(), mesh, placed,
                    {.shape = shape, .stride = std::vector<int64_t>(strides.begin(), strides.end())});
}

}  // namespace tessera
