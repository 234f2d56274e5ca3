#pragma once
// Sends rows of a tensor to the ranks that hold their experts, and back: the communication of expert parallelism.
//
// 5 experts on 2 ranks, which hold experts 0 to 2 and 3 to 4. Each rank has rows sorted by expert:
//
//   rank 0: counts [1, 0, 2, 1, 0]: a0 a2 a2 a3          rank 1: counts [1, 1, 0, 0, 2]: b0 b1 b4 b4
//   sent:   [3, 1]                                       sent:   [2, 2]
//   got:    a0 a2 a2 | b0 b1                             got:    a3 | b4 b4        by rank, then by expert
//   sorted: a0 b0 b1 a2 a2, counts [2, 1, 2]             sorted: a3 b4 b4, counts [1, 2]
//
// Thread safety: plan_dispatch is a pure function; the others are collectives, one thread a rank.

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
  std::vector<int64_t> order;     // row i of the sorted ones was got as row order[i]
  bool some_get_none = false;     // whether there is a rank, this or another, that gets no rows
};

/// `counts[rank][expert]`: how many rows for each of all experts a rank has. Experts are cut over ranks as torch.chunk
/// cuts them.
DispatchPlan plan_dispatch(const std::vector<std::vector<int64_t>>& counts, int64_t rank);

/// Every rank's `counts` (of `num_experts` integers, int32 or int64), whose sum is the number of rows of its `tokens`.
/// Throws ValueError that names `where`, on every rank, if one of them passes other counts, or tokens of another dtype
/// or other sizes behind the rows.
std::vector<std::vector<int64_t>> gather_counts(const at::Tensor& counts, const at::Tensor& tokens, int64_t num_experts,
                                                const DeviceMesh& mesh, const std::string& where);

/// The first sent[0] rows to rank 0 of the 1-D mesh, the next to rank 1, ...: the rows from rank 0, then those from
/// rank 1, ... Differentiable, any number of times: gradients go the way back.
at::Tensor exchange_rows(const at::Tensor& rows, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                         const DeviceMesh& mesh);

}  // namespace tessera
