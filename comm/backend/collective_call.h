#pragma once
// A rank's call of a collective or message, for backends whose ranks read each other's memory ("threads" and "shm").

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

/// Arguments of a call. Tensors are dense, contiguous, of one dtype and on one device. AllReduce, Broadcast and Recv
/// use only `output`, and Send only `input`. On the CPU, `parts` may replace the output of AllGather (with another
/// dtype, too) or the input of ReduceScatter; peers need not do the same.
struct CollectiveCall {
  Collective kind = Collective::Barrier;
  ReduceOp op = ReduceOp::Sum;
  /// Source of a Broadcast, or the peer of a Send or Recv.
  int root = 0;
  int tag = 0;
  at::Tensor output = {};
  at::Tensor input = {};
  TensorSegments parts = {};
  /// Elements of the tensor that the segments replace.
  int64_t parts_numel = -1;
  /// Elements to and from each rank in an AllToAll.
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
};

/// Call without its tensors: the data that ranks must agree on.
struct CollectiveSignature {
  Collective kind = Collective::Barrier;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  int tag = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  /// CPU for a call without tensors.
  c10::Device device = c10::kCPU;
  /// Number of elements; -1 without such a tensor.
  int64_t output = -1;
  int64_t input = -1;
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
};

/// Direction of a message, by ranks of the group.
struct RankPair {
  int from = 0;
  int to = 0;
  // Works around clang-tidy 14, which reports the generated comparison's 0 as a null pointer. NOLINTNEXTLINE
  auto operator<=>(const RankPair&) const = default;
};

/// Makes a Send or Recv from c10d's arguments. Throws ValueError unless there is one dense, contiguous tensor, and
/// `peer` is another rank of the group.
CollectiveCall message_call(Collective kind, const std::vector<at::Tensor>& tensors, int peer, int tag,
                            const GroupInfo& info);

/// Returns the CPU for a call without tensors.
c10::Device call_device(const CollectiveCall& call);

CollectiveSignature make_signature(const CollectiveCall& call);

/// Describes a call in errors: "all_reduce(Sum, Float[8])", "broadcast(source 1, Int[4] on cuda:0)" or "send(to rank 1,
/// tag 3, Float[8])".
std::string describe(const CollectiveSignature& call);
std::string describe(const CollectiveCall& call);

/// Returns "" if the ranks' calls, in rank order (sender and receiver of a message), match; otherwise lists each rank's
/// call.
std::string find_mismatch(c10::ArrayRef<CollectiveSignature> calls);

}  // namespace tessera
