#pragma once
// The vocabulary in which the op families are written.
//
// Most strategies say: along one dim of the computation, operand i has it as its dim operand_dims[i] and output j
// as output_dims[j]; whoever lacks it (kNone) is replicated. bmm(a[b, m, k], b[b, k, n]) → [b, m, n]:
//
//     b: sharded(call, {0, 0}, {0})        m: sharded(call, {1, kNone}, {1})
//     k: sharded(call, {2, 1}, {kNone}, Partial())

#include <optional>

#include "dtensor/propagation/sharding_rule.h"

namespace tessera {

constexpr int64_t kNone = -1;

/// The strategy in which one dim is sharded; tensors that lack it are Replicate, outputs that lack it `reduced`.
AxisStrategy sharded(const OpCall& call, at::IntArrayRef operand_dims, at::IntArrayRef output_dims,
                     const Placement& reduced = Replicate());

/// `dim` counted from the front. A tensor of no dims counts as one of one dim, as in ATen.
int64_t wrap_dim(int64_t dim, int64_t ndim);

/// An int, a list of ints, or None (all dims) as wrapped dims; an empty list means all dims too.
DimVector dims_argument(const c10::IValue& value, int64_t ndim);

bool contains(at::IntArrayRef dims, int64_t dim);

/// Element `i` of a list of one entry a spatial dim, or of one for all; `otherwise` of an empty one.
int64_t spatial_entry(const c10::IValue& list, size_t i, int64_t otherwise);

/// The dim of a tensor that broadcasts to `out` sizes which lies at their dim `dim`; kNone if its size differs there.
int64_t broadcast_dim(const TensorMeta& meta, at::IntArrayRef out, int64_t dim);

/// The same for something of `ndim` dims whose dim `dim` has `size`.
int64_t broadcast_dim(const TensorMeta& meta, int64_t ndim, int64_t dim, int64_t size);

int64_t numel(const TensorMeta& meta);

/// For ops that work along some dims and leave every other dim as it is: operands and outputs of one number of
/// dims, where each dim outside `touched` that all tensors have at one size may be sharded.
Strategies along_dims(const OpCall& call, at::IntArrayRef touched);

/// Where an op of one tensor puts dim `dim` of its operand, in each output; kNone: it may not be sharded.
using OutDim = int64_t (*)(const OpCall& call, int64_t dim);

/// For ops of one tensor whose outputs have the operand's dims in another order, with dims dropped or added.
Strategies map_dims(const OpCall& call, OutDim out_dim);

/// The rule of such an op if it only moves elements: map_dims, and any pending reduction stays pending.
OpRule dim_map_rule(OutDim out_dim);

/// The placement of an operand along call.axis if it is a pending reduction, else nullopt.
std::optional<Placement> pending(const OpCall& call, size_t operand);

/// For ops of one tensor that only move elements (or drop, repeat, or set them to zero): any pending reduction
/// stays pending.
void keep_pending(Strategies& strategies, const OpCall& call);

/// Whether a divisor is the number 0, or a list with it. A pending sum over 0 is no sum of the terms' quotients: these
/// may be infinite of either sign.
bool divides_by_zero(const c10::IValue& divisor);

/// Whether a number is one that no kernel refuses beside tensors of the dtype, so that none has to be asked: of the
/// dtype's kind, and so small that every dtype of that kind holds it.
bool is_surely_taken(const at::Scalar& number, at::ScalarType dtype);

/// Whether terms may be scaled by the numbers among the arguments: inf makes NaN of terms of opposite signs.
bool has_finite_numbers(const OpCall& call);

/// For ops that are linear in `operand` and `others` together: if it is a pending sum or average, then so may be they
/// and all outputs. Not of integers, whose sums may wrap and whose quotients are rounded, not with infinite
/// numbers, and not into fewer bits than the terms have.
void keep_linear(Strategies& strategies, const OpCall& call, size_t operand, at::ArrayRef<size_t> others = {});

/// Argument `index` of a local call.
c10::IValue& local_argument(const c10::OperatorHandle& op, torch::jit::Stack* stack, size_t index);

/// A tensor of 16 bits in the dtype in which kernels compute, since sums may be larger than 16 bits hold; others as
/// they are.
at::Tensor widened(const at::Tensor& tensor);

/// The same of an argument of a local call, if it is a tensor.
void widen(c10::IValue& argument);

/// Replaces the arguments of a local call by its results.
void set_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::vector<c10::IValue> results);

/// Zeros as results where `wanted` is true, undefined tensors elsewhere: what an op makes of a shard without elements,
/// be its outputs empty too or terms of a sum. The wanted outputs are the plan's, in their order.
void set_zero_results(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& plan,
                      at::ArrayRef<bool> wanted);

/// Whether the rank has no element of tensor argument `index` though there are some.
bool is_empty_shard(const c10::OperatorHandle& op, torch::jit::Stack* stack, const SpecPtr& spec, size_t index);

/// The rank's range of a dim of a sharded operand or output.
DimRange range_of(const SpecPtr& spec, int64_t dim);

/// Output metas of ops without a meta kernel whose outputs are all like operand `operand`.
OutputMetas like_operand(size_t operand, size_t num_outputs = 1);

/// The shape of two broadcast tensors.
DimVector broadcast_sizes(const TensorMeta& a, const TensorMeta& b);

}  // namespace tessera
