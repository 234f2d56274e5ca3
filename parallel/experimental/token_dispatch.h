#pragma once
// Sends rows to the ranks of their experts and back. Thread safety: plan_dispatch is pure; the rest are collectives.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

struct DispatchPlan {
  std::vector<int64_t> sent;      // rows to each rank
  std::vector<int64_t> received;  // rows from each rank
  std::vector<int64_t> counts;    // received rows for each of this rank's experts
  std::vector<int64_t> order;     // received index of each sorted row
  bool some_get_none = false;     // true if any rank receives no rows
};

/// Computes this rank's plan from `counts[rank][expert]`, with experts sharded as by torch.chunk.
DispatchPlan plan_dispatch(const std::vector<std::vector<int64_t>>& counts, int64_t rank);

/// Returns every rank's `counts` (int32 or int64). Throws ValueError, on every rank, if counts or tokens do not fit.
std::vector<std::vector<int64_t>> gather_counts(const at::Tensor& counts, const at::Tensor& tokens, int64_t num_experts,
                                                const DeviceMesh& mesh, const std::string& where);

/// Sends sent[i] consecutive rows to rank i of the 1-D mesh and returns the received rows by rank. Supports autograd.
at::Tensor exchange_rows(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                         const DeviceMesh& mesh);

}  // namespace tessera
