#include "dtensor/shard_norms.h"

#include <algorithm>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera {

namespace {

/// Local tensors for one call.
struct NormGroup {
  Placements placements;  // of the norm
  at::ScalarType dtype;
  std::vector<at::Tensor> locals;
};

Placements norm_placements(const DTensorSpec& spec, double p) {
  const auto pending = norm_placement(p);
  TESSERA_ASSERT(pending && !spec.has_partial(), "the {}-norm of shards of {}", p, spec.to_string());
  Placements placements;
  for (const auto& placement : spec.placements()) {
    placements.push_back(placement.is_shard() ? *pending : Replicate());
  }
  return placements;
}

/// Returns each element once, in any order, which does not affect a norm.
at::Tensor dense_elements(const at::Tensor& local) {
  if (local.is_contiguous()) {
    return local;
  }
  return local.is_non_overlapping_and_dense() ? local.as_strided({local.numel()}, {1}) : local.contiguous();
}

/// Groups in order of their first tensors, which is equal on all ranks.
std::vector<NormGroup> sort_locals(const std::vector<at::Tensor>& tensors, double p) {
  std::vector<NormGroup> lists;
  for (const auto& tensor : tensors) {
    const auto& meta = *dtensor_meta(tensor);
    check_not_stale(meta, "the norm of gradients");
    const auto placements = norm_placements(*meta.spec, p);
    auto list = std::ranges::find_if(lists, [&](const NormGroup& other) {
      return other.dtype == meta.spec->dtype() && other.placements == placements;
    });
    if (list == lists.end()) {
      list = lists.insert(lists.end(), {.placements = placements, .dtype = meta.spec->dtype(), .locals = {}});
    }
    list->locals.push_back(dense_elements(meta.local));
  }
  return lists;
}

}  // namespace

std::vector<at::Tensor> norms_of_shards(const std::vector<at::Tensor>& tensors, double p, at::ScalarType dtype,
                                        const LocalNorm& local_norm) {
  std::vector<at::Tensor> norms;
  for (auto& list : sort_locals(tensors, p)) {
    const auto spec = DTensorSpec::make(dtensor_meta(tensors[0])->spec->mesh(), std::move(list.placements),
                                        TensorMeta::contiguous({}, dtype));
    norms.push_back(wrap_local(local_norm(list.locals).to(dtype), spec));
  }
  return norms;
}

}  // namespace tessera
