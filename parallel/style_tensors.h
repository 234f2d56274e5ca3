#pragma once
// A module's inputs and outputs on their way through a style: plain tensors become DTensors, DTensors get the
// placement that is asked for, and come out as DTensors or as local tensors.
//
// Uneven shards. A plain tensor does not know the size of the whole, and local sizes cannot tell it: 3 and 2 columns
// are the cut of 5, but a rank that holds 3 may as well hold a part of 6. So where a plain input is sharded
//   - along a dim whose size the module knows (the input features of a Linear), that size is used: always right,
//     nothing is sent. A rank that passes something else than its part throws, alone if it is the only one;
//   - along any other dim, the ranks exchange their sizes: one all-gather of a few integers a call. It finds the size
//     of the whole, or throws on every rank if the sizes are not a cut as torch.chunk makes it;
//   - `even_shards` promises that all ranks hold equally much and saves the exchange. A broken promise is not found.
// DTensors carry their sizes: keep activations DTensors (use_local_output = false) and nothing is exchanged.
//
// Thread safety: as collectives, one thread a rank.

#include <optional>
#include <string>

#include "dtensor/dtensor.h"

namespace tessera {

struct StyleInputOptions {
  /// What errors begin with: ParallelStyle::describe.
  std::string where;
  /// What errors call the tensor: "input", or "output" where a style places a module's results.
  const char* what = "input";
  /// The global size of the dim that a plain tensor is sharded along, where the module knows it.
  std::optional<int64_t> sharded_size = std::nullopt;
  /// Plain shards are equally long on all ranks.
  bool even_shards = false;
};

/// `tensor` as a DTensor on `mesh` (1-D) under `desired`. A plain one is this rank's part under `layout`; a DTensor's
/// own placement counts. Throws ValueError, which begins with options.where, if a DTensor lies on another mesh, a plain
/// tensor on another type of device or does not fit `layout`, or `desired` is no placement of a tensor of so many dims.
at::Tensor style_input(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& layout,
                       const Placement& desired, const StyleInputOptions& options);

struct StyleOutputOptions {
  /// What errors begin with: ParallelStyle::describe.
  std::string where;
  bool use_local_output = true;
};

/// `tensor`, a DTensor that a layer has just computed, under `layout` on its mesh (1-D), or its local tensor then,
/// which may be written in place. Throws ValueError, which begins with options.where, for a plain tensor and a `layout`
/// that does not fit it.
at::Tensor style_output(const at::Tensor& tensor, const Placement& layout, const StyleOutputOptions& options);

/// The local tensor of `placed`, a DTensor that a style made of `from` and gives up. It may be written in place where
/// `placed` has memory of its own; else it is that of to_local(), as `from` or who made it would not know of the write.
at::Tensor moved_local(at::Tensor placed, const at::Tensor& from);

/// Global sizes of the tensor of which each rank of `mesh` (1-D) holds `local` under Shard(dim), found by one
/// all-gather. Throws ValueError, on every rank, if these tensors are not the cut of one that torch.chunk makes.
/// `options` say what errors begin with and what they call the tensor.
std::vector<int64_t> exchange_shape(const at::Tensor& local, const DeviceMesh& mesh, int64_t dim,
                                    const StyleInputOptions& options);

}  // namespace tessera
