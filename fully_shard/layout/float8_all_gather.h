#pragma once
// All-gathers in float8 (e4m3), with a new scale for each rank's rows of a parameter in each gather.
//
//   fully_shard(block, {.all_gather_extension_fn = [](const at::Tensor& param, const std::string&) {
//     return param.dim() == 2 ? float8_all_gather() : nullptr;
//   }});
//
// Forward and backward compute with the float8 values (docs/semantics.md). Source: torchao/float8/fsdp_utils.py.

#include <memory>

#include "fully_shard/layout/all_gather_extension.h"

namespace tessera {

/// Returns the extension. Thread safety: any thread; it is stateless.
std::shared_ptr<const AllGatherExtension> float8_all_gather();

}  // namespace tessera
