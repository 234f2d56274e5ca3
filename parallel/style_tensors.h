#pragma once
// Converts a module's inputs and outputs for a style on a 1-D mesh. docs/semantics.md covers uneven plain shards.
// Thread safety: like collectives, one thread per rank.

#include <optional>
#include <string>

#include "dtensor/dtensor.h"

namespace tessera {

struct StyleInputOptions {
  std::string where;                                   // start of error messages: ParallelStyle::describe
  const char* what = "input";                          // name of the tensor in error messages
  std::optional<int64_t> sharded_size = std::nullopt;  // global size of a plain shard's dim, if known
  bool even_shards = false;                            // promises equal plain shards on all ranks
};

/// Returns `tensor` as a DTensor under `desired`. A plain tensor is local under `layout`. Throws ValueError if a
/// placement, mesh or device does not fit.
at::Tensor style_input(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& layout,
                       const Placement& desired, const StyleInputOptions& options);

struct StyleOutputOptions {
  std::string where;
  bool use_local_output = true;
};

/// Returns DTensor `tensor` under `layout`, or its local tensor, which may be written. Throws ValueError if plain.
at::Tensor style_output(const at::Tensor& tensor, const Placement& layout, const StyleOutputOptions& options);

/// Returns the local tensor of `placed`, which was made from `from`. It may be written if `placed` has its own memory.
at::Tensor moved_local(at::Tensor placed, const at::Tensor& from);

/// Returns the global sizes of local tensors under Shard(dim), by one all-gather. Throws ValueError on every rank if
/// they are not torch.chunk's shards.
std::vector<int64_t> exchange_shape(const at::Tensor& local, const DeviceMesh& mesh, int64_t dim,
                                    const StyleInputOptions& options);

}  // namespace tessera
