#pragma once
// One collective, or one end of a message, as a rank brings it to the backends in which ranks read each other's memory
// ("threads" and "shm").

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"
#include "comm/context/collective.h"

namespace tessera {

struct GroupInfo;

/// The tensors are dense, contiguous, of one dtype and on one device. AllReduce, Broadcast and Recv use `output` alone,
/// and Send `input`. On the CPU, AllGather may have parts in place of `output`, also of another dtype, and
/// ReduceScatter in place of `input`; the peers need not know.
struct CollectiveCall {
  Collective kind = Collective::Barrier;
  ReduceOp op = ReduceOp::Sum;
  /// The source of a Broadcast, or the rank at the other end of a Send or Recv.
  int root = 0;
  int tag = 0;
  at::Tensor output = {};
  at::Tensor input = {};
  TensorSegments parts = {};
  /// Elements of the tensor in whose place the parts are.
  int64_t parts_numel = -1;
  /// AllToAll: elements that go to, and come from, each rank.
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
};

/// A call without its tensors: what the ranks must agree on.
struct CollectiveSignature {
  Collective kind = Collective::Barrier;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  int tag = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  /// The CPU for a call without tensors.
  c10::Device device = c10::kCPU;
  /// Elements; -1 where there is no such tensor.
  int64_t output = -1;
  int64_t input = -1;
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
};

/// The way of a message, by ranks of the group.
struct RankPair {
  int from = 0;
  int to = 0;
  // clang-tidy 14 takes the 0 of the comparison that is generated for a null pointer. NOLINTNEXTLINE
  auto operator<=>(const RankPair&) const = default;
};

/// One end of a message, a Send or a Recv, as c10d's call brings it. Throws ValueError unless `tensors` is one dense
/// and contiguous tensor and `peer` another rank of the group.
CollectiveCall message_call(Collective kind, const std::vector<at::Tensor>& tensors, int peer, int tag,
                            const GroupInfo& info);

/// The CPU for a call without tensors.
c10::Device device_of(const CollectiveCall& call);

CollectiveSignature shape_of(const CollectiveCall& call);

/// "all_reduce(Sum, Float[8])", "broadcast(source 1, Int[4] on cuda:0)" or "send(to rank 1, tag 3, Float[8])", for
/// messages.
std::string describe(const CollectiveSignature& call);
std::string describe(const CollectiveCall& call);

/// "" if the ranks' calls (one a rank, in order) belong together; otherwise what each rank called. Of a message the two
/// calls are those of its sender and of its receiver.
std::string find_mismatch(c10::ArrayRef<CollectiveSignature> calls);

}  // namespace tessera
