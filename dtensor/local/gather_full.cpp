#include "dtensor/local/gather_full.h"

#include "dtensor/local/redistribute.h"

namespace tessera {

at::Tensor gather_full(const DTensorMeta& meta) {
  check_not_stale(meta, "reading the whole tensor");
  const auto& spec = *meta.spec;
  auto placements = spec.placements();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (spec.mesh().shape()[axis] == 1) {  // all placements have the same data
      placements[axis] = Replicate();
    }
  }
  return redistribute_local(meta.local, *spec.with_placements(placements), Placements(placements.size(), Replicate()));
}

at::Tensor local_shard_of(const at::Tensor& whole, const DTensorSpec& spec) {
  const auto replicated = spec.with_placements(Placements(spec.placements().size(), Replicate()));
  return redistribute_local(whole, *replicated, spec.placements());
}

}  // namespace tessera
