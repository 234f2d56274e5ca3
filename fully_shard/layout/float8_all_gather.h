#pragma once
// All-gathers in float8 (e4m3), with a scale for each rank's rows of a parameter, chosen anew each time.
//
//   fully_shard(block, {.all_gather_extension_fn = [](const at::Tensor& param, const std::string&) {
//     return param.dim() == 2 ? float8_all_gather() : nullptr;
//   }});
//
// Forward and backward compute with the values that float8 has (docs/semantics.md). After torchao/float8/fsdp_utils.py.

#include <memory>

#include "fully_shard/layout/all_gather_extension.h"

namespace tessera {

/// Thread safety: any thread; it has no state.
std::shared_ptr<const AllGatherExtension> float8_all_gather();

}  // namespace tessera
