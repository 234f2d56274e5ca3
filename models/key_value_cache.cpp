#include "models/key_value_cache.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/dtensor.h"

namespace tessera::models {

namespace {

constexpr int64_t kTokens = 2;  // dim of [batch, heads, tokens, head_dim]

at::Tensor append_to(at::Tensor& stored, const at::Tensor& added, int64_t length, int64_t capacity) {
  const at::Tensor local = is_dtensor(added) ? to_local(added) : added;
  if (!stored.defined()) {
    auto sizes = local.sizes().vec();
    sizes[kTokens] = capacity;
    stored = at::empty(sizes, local.options());
  }
  TESSERA_CHECK(ValueError, stored.size(0) == local.size(0),
                "KeyValueCache: {} rows, but the cache has {}; give the same rows at each call", local.size(0),
                stored.size(0));
  stored.narrow(kTokens, length, local.size(kTokens)).copy_(local);
  const auto all = stored.narrow(kTokens, 0, length + local.size(kTokens));
  if (!is_dtensor(added)) {
    return all;
  }
  auto shape = added.sizes().vec();
  shape[kTokens] = all.size(kTokens);
  return from_local(all, device_mesh(added), placements(added), {.shape = shape});
}

void check_whole_tokens(const at::Tensor& tensor) {
  if (is_dtensor(tensor)) {
    TESSERA_CHECK(NotImplementedError,
                  std::ranges::none_of(
                      placements(tensor),
                      [](const Placement& placement) { return placement.is_partial() || placement == Shard(kTokens); }),
                  "KeyValueCache: keys or values are {}; shard them by heads or batch alone",
                  to_string(placements(tensor)));
  }
}

}  // namespace

void KeyValueCache::append(size_t layer, at::Tensor& keys, at::Tensor& values) {
  check_whole_tokens(keys);
  check_whole_tokens(values);
  if (layer >= layers_.size()) {
    layers_.resize(layer + 1);
  }
  keys = append_to(layers_[layer].keys, keys, length_, capacity_);
  values = append_to(layers_[layer].values, values, length_, capacity_);
}

}  // namespace tessera::models
