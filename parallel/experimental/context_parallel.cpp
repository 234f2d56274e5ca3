#include "parallel/experimental/context_parallel.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/strides.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "dtensor/spec/shard_math.h"

namespace tessera {

namespace {

// Dims of [batch, heads, length, head_dim].
constexpr int64_t kBatch = 0;
constexpr int64_t kHeads = 1;
constexpr int64_t kLength = 2;
constexpr int64_t kHeadDim = 3;

void check_tensor(const at::Tensor& tensor, const char* name, const DeviceMesh& mesh) {
  const auto& spec = dtensor_spec(tensor);
  TESSERA_CHECK(ValueError, spec->ndim() == 4 && spec->mesh() == mesh,
                "context_parallel_attention: {} is {}; all three must be [batch, heads, length, head_dim] on one mesh",
                name, spec->to_string());
}

/// Returns the number of ranks over which the dim is sharded.
int64_t ranks_along(const DTensorSpec& spec, int64_t dim) {
  int64_t ranks = 1;
  for (size_t axis = 0; axis < spec.placements().size(); ++axis) {
    ranks *= spec.placements()[axis].is_shard(dim) ? spec.mesh().size(static_cast<int64_t>(axis)) : 1;
  }
  return ranks;
}

/// Checks the global sizes on all ranks, because a rank without queries calls no kernel that would detect an error.
void check_sizes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool enable_gqa) {
  const auto fits = [&](int64_t dim) {
    const bool is_sharded = ranks_along(*dtensor_spec(query), dim) > 1;
    return key.size(dim) == value.size(dim) &&
           (key.size(dim) == query.size(dim) || (key.size(dim) == 1 && !is_sharded));
  };
  const int64_t heads = query.size(kHeads), groups = key.size(kHeads);
  const bool has_groups = enable_gqa && groups == value.size(kHeads) && groups > 0 && heads % groups == 0;
  TESSERA_CHECK(ValueError,
                fits(kBatch) && (fits(kHeads) || has_groups) && key.size(kLength) == value.size(kLength) &&
                    query.size(kHeadDim) == key.size(kHeadDim),
                "context_parallel_attention: query [{}], key [{}] and value [{}] do not fit. All have as many batch "
                "items and heads (with enable_gqa, the query a multiple of the others' heads), key and value one "
                "length, query and key one head_dim",
                fmt::join(query.sizes(), ", "), fmt::join(key.sizes(), ", "), fmt::join(value.sizes(), ", "));
}

void check_query(const at::Tensor& query, const at::Tensor& key) {
  const auto& spec = dtensor_spec(query);
  TESSERA_CHECK(ValueError, ranks_along(*spec, kHeadDim) == 1,
                "context_parallel_attention: the query is {}; batch, heads and length may be cut, head_dim may not",
                spec->to_string());
  const int64_t ranks = ranks_along(*spec, kHeads);
  const bool whole_groups = query.size(kHeads) % ranks == 0 && key.size(kHeads) % ranks == 0;
  TESSERA_CHECK(NotImplementedError, query.size(kHeads) == key.size(kHeads) || whole_groups,
                "context_parallel_attention: {} query heads and {} key heads cut over {} ranks, which splits a group; "
                "repeat keys and values for each query head, or replicate the heads",
                query.size(kHeads), key.size(kHeads), ranks);
}

/// Returns `placements` with shards of the length replaced by `replacement`.
Placements with_length(Placements placements, const Placement& replacement) {
  for (auto& placement : placements) {
    placement = placement.is_shard(kLength) ? replacement : placement;
  }
  return placements;
}

/// Computes attention for one rank's queries, omitting keys that none of them may see.
at::Tensor local_attention(const at::Tensor& query, at::Tensor key, at::Tensor value, int64_t first_query,
                           const ContextAttentionOptions& options) {
  if (query.numel() == 0) {
    // Kernels divide by the number of queries, but gradients of the keys must exist on every rank, as zeros.
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
  check_sizes(query, key, value, options.enable_gqa);
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
