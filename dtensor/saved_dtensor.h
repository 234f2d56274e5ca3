#pragma once
// Saves and loads a rank's shard of a DTensor with torch::save and torch::load. Thread safety: like these.

#include <ATen/core/Tensor.h>

#include "device_mesh/device_mesh.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace tessera {

struct SavedDTensor {
  at::Tensor tensor = {};  // loaded ones are leaves
  DeviceMesh mesh = {};    // for loading; same shape and axis names as saved
};

/// Throws ValueError for a plain or NormPartial tensor, and StateError for a stale view (docs/semantics.md).
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const SavedDTensor& saved);

/// Throws ValueError if the mesh, rank or sizes differ, and c10::Error for another kind of file; changes nothing then.
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, SavedDTensor& saved);

}  // namespace tessera
