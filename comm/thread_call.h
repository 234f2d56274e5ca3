#pragma once
// One collective of ranks that are threads: what each rank brings, and the work itself.
//
// When all ranks of a group have brought their call, one of them carries it out for all, as a plain function over
// memory; so a collective costs one hand-over, has no data race by construction, and adds in the order of the ranks.

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/comm_stats.h"
#include "comm/reduce_op.h"

namespace tessera {

/// The tensors are dense, contiguous and on the CPU. AllReduce and Broadcast use `output` alone.
struct ThreadCall {
  Collective kind = Collective::Barrier;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  at::Tensor output = {};
  at::Tensor input = {};
  /// AllToAll: elements that go to, and come from, each rank.
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
};

/// "all_reduce(Sum, Float[8])", for messages.
std::string describe(const ThreadCall& call);

/// "" if the ranks' calls (one a rank, in order) belong together; otherwise what each rank called.
std::string find_mismatch(c10::ArrayRef<ThreadCall> calls);

/// Carries out calls that belong together.
void execute(c10::ArrayRef<ThreadCall> calls);

}  // namespace tessera
