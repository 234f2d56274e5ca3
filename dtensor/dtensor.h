#pragma once
// DTensor: an at::Tensor with global sizes, distributed over a device mesh.
//
//   auto x = distribute_tensor(at::randn({5, 3}), mesh, {Shard(0)});  // 2 ranks hold 3 and 2 rows
//   full_tensor(x.matmul(w).relu().sum()).item<float>();              // equal on every rank
//
// All ranks call the same ops in the same order. Ops throw NotImplementedError if they have no sharding rule, and
// ValueError if they mix DTensors with plain tensors, except scalars. docs/semantics.md covers views and gradients.
// Thread safety: like at::Tensor. Source: torch/distributed/tensor/_api.py.

#include <optional>

#include "device_mesh/device_mesh.h"
#include "dtensor/local/redistribute.h"
#include "dtensor/spec/placement.h"

namespace tessera {

bool is_dtensor(const at::Tensor& tensor);  // false if undefined

const Placements& placements(const at::Tensor& tensor);
const DeviceMesh& device_mesh(const at::Tensor& tensor);  // both live as long as `tensor`; ValueError if plain

struct DistributeOptions {
  std::optional<int> src_data_rank = 0;  // source rank along each axis; std::nullopt: values are already equal
};

/// Shards or replicates a leaf into a new row-major leaf. Throws ValueError for Partial or placements that do not fit.
at::Tensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements,
                             DistributeOptions options = {});

struct FromLocalOptions {
  std::optional<std::vector<int64_t>> shape = std::nullopt;   // global sizes; default: equal shards
  std::optional<std::vector<int64_t>> stride = std::nullopt;  // global strides; default: row-major
  bool run_check = false;  // compare sizes and replicas across ranks, on all of which a mismatch throws
  std::optional<Placements> grad_placements = std::nullopt;  // of the local gradient; see docs/semantics.md
};

/// Makes a DTensor of local tensors, sharing contiguous memory. Supports autograd. Throws ValueError for wrong sizes.
at::Tensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements,
                      FromLocalOptions options = {});

/// Returns the local tensor, sharing memory. Supports autograd; clone it before in-place ops with gradients. Throws
/// ValueError on every rank if `grad_placements` (default: the tensor's, Replicate for Partial) shard it differently.
at::Tensor to_local(const at::Tensor& tensor, std::optional<Placements> grad_placements = std::nullopt);

/// Like to_local, for a DTensor that is no longer used; the result may be written.
at::Tensor take_local(at::Tensor tensor, std::optional<Placements> grad_placements = std::nullopt);

/// Returns the whole tensor on every rank, sharing memory if replicated. Pass Partial `grad_placements` if the ranks'
/// gradients are terms of a sum. Throws ValueError if undefined, or if plain with `grad_placements`.
at::Tensor full_tensor(const at::Tensor& tensor, std::optional<Placements> grad_placements = std::nullopt);

}  // namespace tessera
