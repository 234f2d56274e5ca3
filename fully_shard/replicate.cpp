#include "fully_shard/replicate.h"

#include "fully_shard/make_unit.h"

namespace tessera {

void replicate(ModuleRef module, ReplicateOptions options) {
  make_unit({.api = "replicate",
             .kind = DataParallelKind::Replicate,
             .modules = {&*module},
             .options = {.mesh = std::move(options.mesh),
                         .reshard_after_forward = false,
                         .mp_policy = options.mp_policy,
                         .offload_policy = options.offload_policy,
                         .shard_placement_fn = nullptr,
                         .all_gather_extension_fn = nullptr,
                         .ignored_params = std::move(options.ignored_params)},
             .bucket_cap_mb = options.bucket_cap_mb});
}

}  // namespace tessera
