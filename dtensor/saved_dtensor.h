#pragma once
// DTensors in the files of torch::save and torch::load: each rank writes and reads its own part and the layout.
//
//   torch::save(SavedDTensor{weight}, fmt::format("weight.{}.pt", mesh.local_rank()));   // every rank its file
//   SavedDTensor loaded{.mesh = mesh};
//   torch::load(loaded, fmt::format("weight.{}.pt", mesh.local_rank()));
//   weight = loaded.tensor;                                   // bit-equal, same placements
//
// As in PyTorch, such a file fits the mesh that it was written on and nothing else. torch::save of the tensor itself
// throws, since it writes data of which a DTensor has none.
//
// Thread safety: as torch::save and torch::load; nothing is communicated.

#include <ATen/core/Tensor.h>

#include "device_mesh/device_mesh.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace tessera {

struct SavedDTensor {
  /// What is saved, or was loaded. Any DTensor but one of a pending norm; loaded ones are leaves.
  at::Tensor tensor = {};
  /// For loading: the mesh on which the tensor lies, of the shape and axis names that were saved.
  DeviceMesh mesh = {};
};

/// Throws ValueError if `saved.tensor` is no DTensor or a pending norm, StateError if it is a view of moved data
/// (dtensor.h) whose tensor was written since.
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const SavedDTensor& saved);

/// Throws ValueError if `saved.mesh` is empty, of other axes or sizes than the saved one, if the file is another
/// rank's, or if its part does not have the sizes that the layout gives this rank; c10::Error for a file that is no
/// such archive. `saved.tensor` is as before then.
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, SavedDTensor& saved);

}  // namespace tessera
