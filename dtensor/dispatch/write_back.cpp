#include "dtensor/dispatch/write_back.h"

#include <algorithm>

#include "base/error.h"
#include "dtensor/local/from_local_checks.h"
#include "dtensor/local/redistribute.h"

namespace tessera {

namespace {

bool is_partial_norm(const DTensorSpec& spec) {
  return std::any_of(spec.placements().begin(), spec.placements().end(),
                     [](const Placement& placement) { return placement.is_norm_partial(); });
}

}  // namespace

void write_back(const c10::OperatorHandle& op, const CallOperand& operand, const at::Tensor& local,
                const SpecPtr& spec) {
  const DTensorMeta& home = *operand.dtensor;
  if (!is_partial_norm(*home.spec)) {
    home.local.copy_(redistribute_local(local, *spec, home.spec->placements()));
    return;
  }
  const bool owns = has_own_local_memory(*operand.tensor);  // if a shard is empty, views share nothing
  TESSERA_CHECK(NotImplementedError, same_on_all_ranks({owns}, home.spec->mesh()) && owns,
                "{}: it writes to {} {}, a pending norm whose memory other tensors have too, such as one that detach() "
                "or a view made, or that a backward needs. redistribute() it first",
                toString(op.operator_name()), to_string(home.spec->meta()), to_string(home.spec->placements()));
  operand.tensor->unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<DTensorMeta>(local, spec, home.origin));
}

}  // namespace tessera
