#include "tests/dtensor/from_term.h"

#include <algorithm>

namespace tessera {

at::Tensor from_term(const at::Tensor& term, const DeviceMesh& mesh, const Placements& placements) {
  auto cuts = placements;
  std::replace_if(
      cuts.begin(), cuts.end(), [](const Placement& placement) { return placement.is_partial(); },
      Placement(Replicate()));
  const auto own = term.clone(at::MemoryFormat::Contiguous);
  const auto local = to_local(distribute_tensor(own, mesh, cuts, {.src_data_rank = std::nullopt}));
  return from_local(local, mesh, placements, {.shape = own.sizes().vec(), .stride = own.strides().vec()});
}

}  // namespace tessera
