#pragma once
// Bytes of a catalog's tensors into memory, verified; internal to this package.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/catalog.h"

namespace tessera::dcp {

/// A stored tensor's elements for a tensor in memory.
struct ReadRequest {
  const StoredTensor* tensor = nullptr;
  std::string key;  // for messages
  Box box;
  at::Tensor out;  // contiguous, on the host, of box.sizes
};

/// Fills each `out` with the elements of its `box`, cast to its dtype, one request after the other; `on_read(i)` is
/// called when request i is done. Where the parts have checksums, whole blocks are read and verified, while the disk
/// reads what comes next. Throws CheckpointError. Thread safety: reentrant.
void read_tensors(const std::vector<ReadRequest>& requests, const std::function<void(size_t)>& on_read);

}  // namespace tessera::dcp
