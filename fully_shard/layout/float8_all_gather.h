#pragma once
// All-gathers that send a byte an element: float8 (e4m3), with a scale for each rank's rows of a parameter, chosen anew
// each time so that the largest of them is the largest of the format.
//
//   fully_shard(block, {.all_gather_extension_fn = [](const at::Tensor& param, const std::string&) {
//     return param.dim() == 2 ? float8_all_gather() : nullptr;        // matrices: vectors hardly count
//   }});
//
// Forward and backward compute in the parameter's compute dtype, with the values that float8 has: an element is at most
// 2^-4 of itself off, or 2^-10 of 1/448 of the largest of its rows where it is tiny. Shards and optimizer stay as they
// are, and gradients are those of the decoded values. Infinite and NaN rows come as NaN.
// After dynamic scaling of float8 all-gathers in torchao (torchao/float8/fsdp_utils.py), there one scale a tensor.

#include <memory>

#include "fully_shard/layout/all_gather_extension.h"

namespace tessera {

/// Thread safety: any thread; it has no state.
std::shared_ptr<const AllGatherExtension> float8_all_gather();

}  // namespace tessera
