#pragma once
// Placements: how a tensor lies along one axis of a device mesh.
//
//   Shard(dim)     each rank holds a slice of `dim`, cut as torch.chunk cuts: ceil(size / n) each, the
//                  last ones smaller or empty. A negative dim counts from the end, as in PyTorch.
//   Replicate()    each rank holds the whole tensor
//   Partial(op)    each rank holds a term; the tensor is the reduction of all terms by `op`
//
// A DTensor has one placement an axis: on the mesh {dp: 2, tp: 2}, {Shard(0), Replicate()} cuts dim 0 over
// dp and copies it over tp. Two axes may shard the same dim. The earlier axis then makes the outer cut, unless
// orders say otherwise: a weight whose rows tensor parallelism cut first and FSDP second is
// {Shard(0, 1), Shard(0)} on that mesh: tp's cut (order 0) is the outer one, dp's (order 1) lies inside it.
// PyTorch spells it _StridedShard(0, split_factor=2); an order needs no even sizes.
//
// Linear ops leave a pending sum or average pending: each rank computes on its own term. That is the op on the whole
// as long as the other tensors are finite. Where they hold infinities (or zeros that are divided by), terms of opposite
// signs give NaN where the whole gives inf: redistribute before such an op. Where it is a number that is infinite, or
// zero and divided by, the sum is reduced first by itself.
//
// Terms are kept in the tensor's dtype. In float16 and bfloat16 a term may be rounded, or too large, where the sum is
// neither: reduce in float32 (MixedPrecisionPolicy::reduce_dtype, x.sum(at::kFloat)) where that matters.
//
// Thread safety: values. Names and meaning follow torch/distributed/tensor/placement_types.py.

#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "comm/backend/reduce_op.h"

namespace tessera {

class Placement {
 public:
  bool is_replicate() const { return kind_ == Kind::Replicate; }
  bool is_shard() const { return kind_ == Kind::Shard; }
  bool is_shard(int64_t dim) const { return kind_ == Kind::Shard && dim_ == dim; }
  /// True for every pending reduction, also for norm_partial.
  bool is_partial() const { return kind_ == Kind::Partial || kind_ == Kind::NormPartial; }
  bool is_partial(ReduceOp op) const { return kind_ == Kind::Partial && op_ == op; }
  bool is_norm_partial() const { return kind_ == Kind::NormPartial; }

  /// The sharded dim. Only for is_shard().
  int64_t dim() const { return dim_; }
  /// Which cut comes first where several axes shard one dim: lower orders are outer, equal ones in order of
  /// the axes. Only for is_shard().
  int order() const { return order_; }
  /// The pending reduction. Only for is_partial() that is not is_norm_partial().
  ReduceOp reduce_op() const { return op_; }
  /// The p of a pending p-norm. Only for is_norm_partial().
  double norm_type() const { return norm_type_; }

  bool operator==(const Placement& other) const = default;
  /// This placement with order 0.
  Placement without_order() const;

  /// As it is written in C++: "Shard(0)", "Shard(0, 1)", "Replicate()", "Partial(Sum)".
  std::string to_string() const;
  uint64_t hash() const;

 protected:
  enum class Kind : uint8_t { Replicate, Shard, Partial, NormPartial };
  Placement(Kind kind, int64_t dim, ReduceOp op, double norm_type = 0, int order = 0)
      : kind_(kind),
        op_(op),
        order_(static_cast<int16_t>(order)),
        dim_(static_cast<int32_t>(dim)),
        norm_type_(norm_type) {}

 private:
  Kind kind_;
  ReduceOp op_;
  int16_t order_;
  int32_t dim_;
  double norm_type_;
};

// Spelled as types so that `Shard(0)` reads as in Python; they add nothing to Placement and may be sliced.
class Shard : public Placement {
 public:
  explicit Shard(int64_t dim, int order = 0) : Placement(Kind::Shard, dim, ReduceOp::Sum, 0, order) {}
};

class Replicate : public Placement {
 public:
  Replicate() : Placement(Kind::Replicate, 0, ReduceOp::Sum) {}
};

class Partial : public Placement {
 public:
  explicit Partial(ReduceOp op = ReduceOp::Sum) : Placement(Kind::Partial, 0, op) {}
};

/// The terms are p-norms of the parts; the tensor is (sum term^p)^(1/p). It lets a norm over many sharded
/// tensors (gradient clipping) cost one reduction. The library makes it; from_local refuses it.
class NormPartial : public Placement {
 public:
  explicit NormPartial(double p) : Placement(Kind::NormPartial, 0, ReduceOp::Sum, p) {}
};

/// What the p-norms of shards form; nullopt where a norm cannot be computed from them.
std::optional<Placement> norm_placement(double p);

/// One placement an axis. Up to four axes need no allocation.
using Placements = c10::SmallVector<Placement, 4>;

/// "(Shard(0), Replicate())"
std::string to_string(const Placements& placements);

/// The axes of `placements` that shard, in the order of their cuts: where two of them cut the same dim, the one
/// that comes first makes the outer cut.
c10::SmallVector<size_t, 4> cut_order(const Placements& placements);

/// `placements` with orders such that cuts of one dim come in the order of the axes in `axes`, each axis once.
/// Orders are the smallest that say so: 0 for all cuts of a dim that come in the order of the mesh's axes.
Placements with_cut_order(Placements placements, const c10::SmallVector<size_t, 4>& axes);

/// `placements` with non-negative dims and the smallest orders, for a tensor of `ndim` dims on a mesh of
/// `mesh_ndim` axes: equal layouts become equal placements.
/// Throws ValueError that names `where` if their number is not mesh_ndim or a dim or order is out of range, or if
/// pending reductions of several axes do not commute, as Sum and Max.
Placements normalized(Placements placements, int64_t ndim, int64_t mesh_ndim, const char* where);

}  // namespace tessera

template <>
struct fmt::formatter<tessera::Placement> : fmt::formatter<std::string> {
  auto format(const tessera::Placement& placement, fmt::format_context& context) const {
    return fmt::formatter<std::string>::format(placement.to_string(), context);
  }
};
template <>
struct fmt::formatter<tessera::Shard> : fmt::formatter<tessera::Placement> {};
template <>
struct fmt::formatter<tessera::Replicate> : fmt::formatter<tessera::Placement> {};
template <>
struct fmt::formatter<tessera::Partial> : fmt::formatter<tessera::Placement> {};
