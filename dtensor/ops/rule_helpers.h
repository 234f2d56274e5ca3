#pragma once
// Helpers for writing sharding rules.
//
// Most strategies shard one dim of the computation, which is dim operand_dims[i] of operand i and output_dims[j] of
// output j; tensors without it (kNone) are replicated. bmm(a[b, m, k], b[b, k, n]) → [b, m, n]:
//
//     b: sharded(call, {0, 0}, {0})        m: sharded(call, {1, kNone}, {1})
//     k: sharded(call, {2, 1}, {kNone}, Partial())

#include <optional>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

constexpr int64_t kNone = -1;

/// Returns the strategy that shards one dim. Operands without it are Replicate, and outputs without it `reduced`.
AxisStrategy sharded(const OpCall& call, at::IntArrayRef operand_dims, at::IntArrayRef output_dims,
                     const Placement& reduced = Replicate());

/// Returns `dim` as a non-negative index. A tensor without dims counts as 1-D, as in ATen.
int64_t wrap_dim(int64_t dim, int64_t ndim);

/// Converts an int, a list of ints, or None (all dims) to non-negative dims; an empty list also means all.
DimVector dims_argument(const c10::IValue& value, int64_t ndim);

bool contains(at::IntArrayRef dims, int64_t dim);

/// Returns entry `i` of a list with one entry per spatial dim or for all; `otherwise` for an empty one.
int64_t spatial_entry(const c10::IValue& list, size_t i, int64_t otherwise);

/// Returns the dim of a tensor that broadcasts to dim `dim` of `out` sizes; kNone if its size differs there.
int64_t broadcast_dim(const TensorMeta& meta, at::IntArrayRef out, int64_t dim);

/// Like the above, for `ndim` dims of which dim `dim` has `size`.
int64_t broadcast_dim(const TensorMeta& meta, int64_t ndim, int64_t dim, int64_t size);

int64_t numel(const TensorMeta& meta);

/// Strategies of ops that affect only some dims. Operands and outputs have the same number of dims, and each dim
/// outside `touched` with equal size in all tensors may be sharded.
Strategies along_dims(const OpCall& call, at::IntArrayRef touched);

/// Maps dim `dim` of the operand to each output's; kNone if it must not be sharded.
using OutDim = int64_t (*)(const OpCall& call, int64_t dim);

/// Strategies of ops of one tensor that reorder, drop or add dims.
Strategies map_dims(const OpCall& call, OutDim out_dim);

/// Returns the rule of such an op that only moves elements: map_dims, and Partial stays Partial.
OpRule dim_map_rule(OutDim out_dim);

/// Returns an operand's placement along call.axis if it is Partial, otherwise nullopt.
std::optional<Placement> pending(const OpCall& call, size_t operand);

/// Keeps Partial for ops of one tensor that only move, drop, repeat or zero elements.
void keep_partial(Strategies& strategies, const OpCall& call);

/// Returns whether a divisor is 0, or a list with 0. A partial sum over 0 does not equal the sum of its terms'
/// quotients, which may be infinite with either sign.
bool divides_by_zero(const c10::IValue& divisor);

/// Returns whether no kernel rejects the number with tensors of the dtype. This holds if it has the dtype's kind and
/// fits every dtype of that kind.
bool is_surely_taken(const at::Scalar& number, at::ScalarType dtype);

/// Returns whether terms may be scaled by the numbers among the arguments. Infinity would turn terms of opposite signs
/// to NaN.
bool has_finite_numbers(const OpCall& call);

/// Keeps Partial for ops that are linear in `operand` and `others` together. If `operand` is a partial sum or average,
/// so may be the others and all outputs. Excludes integers, whose sums may wrap and quotients are rounded, infinite
/// numbers, and narrower output dtypes.
void keep_linear(Strategies& strategies, const OpCall& call, size_t operand, at::ArrayRef<size_t> others = {});

/// Returns argument `index` of a local call.
c10::IValue& local_argument(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t index);

/// Returns a 16-bit tensor in the dtype in which kernels compute, since sums may exceed 16 bits; others unchanged.
at::Tensor widened(const at::Tensor& tensor);

/// Like widened, for an argument of a local call, if it is a tensor.
void widen(c10::IValue& argument);

/// Replaces the arguments of a local call by its results.
void set_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::vector<c10::IValue> results);

/// Sets zeros as results where `wanted` is true, and undefined tensors elsewhere. These are the results of a shard
/// without elements, whether outputs are empty or terms of a sum. Wanted outputs are the plan's, in order.
void set_zero_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan,
                      at::ArrayRef<bool> wanted);

/// Returns whether this rank has no element of a nonempty tensor argument `index`.
bool is_empty_shard(const c10::OperatorHandle& op, torch::jit::Stack* stack, const SpecPtr& spec, size_t index);

/// Returns this rank's range of a dim of a sharded operand or output.
DimRange local_range(const SpecPtr& spec, int64_t dim);

/// Output metas of ops without a meta kernel whose outputs are like operand `operand`.
OutputMetas like_operand(size_t operand, size_t num_outputs = 1);

/// Returns the sizes of two broadcast tensors.
DimVector broadcast_sizes(const TensorMeta& a, const TensorMeta& b);

}  // namespace tessera
