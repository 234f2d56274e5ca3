#include "dtensor/local/redistribute_step.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "base/error.h"

namespace tessera {

namespace {

StepInFlight done(at::Tensor result) {
  return {.collective = Pending(), .finish = [result = std::move(result)] { return result; }};
}

/// A step's view of the mesh: the ranks along its axis, and this rank's index among them.
struct AxisView {
  const ProcessGroupPtr& group;
  int64_t num_ranks;
  int64_t rank;
};

/// Pads a tensor for a collective, which sends memory: first resolves a lazy conj() or imag().
at::Tensor pad_rows(const at::Tensor& tensor, int64_t rows) {
  if (tensor.size(0) == rows) {
    return tensor.resolve_conj().resolve_neg().contiguous();
  }
  std::vector<int64_t> padding(static_cast<size_t>(2 * tensor.dim()), 0);
  padding.back() = rows - tensor.size(0);
  return at::constant_pad_nd(tensor, padding).contiguous();  // it keeps a channels-last order of four dims
}

std::vector<int64_t> sizes_with_rows(const at::Tensor& tensor, int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

/// All chunks except the last are full, so padding is only at the end of the concatenation, and one narrow removes it.
StepInFlight all_gather_dim(const at::Tensor& local, int64_t dim, int64_t length, const AxisView& axis) {
  const int64_t chunk = chunk_length(length, axis.num_ranks);
  const auto input = pad_rows(local.movedim(dim, 0), chunk);
  auto output = at::empty(sizes_with_rows(input, chunk * axis.num_ranks), input.options());
  auto pending = all_gather_async(output, input, axis.group);
  return {.collective = std::move(pending),
          .finish = [output, input, dim, length] { return output.narrow(0, 0, length).movedim(0, dim).contiguous(); }};
}

StepInFlight reduce_scatter_dim(const at::Tensor& local, int64_t dim, ReduceOp op, const AxisView& axis) {
  const int64_t length = local.size(dim);
  const int64_t chunk = chunk_length(length, axis.num_ranks);
  const auto input = pad_rows(local.movedim(dim, 0), chunk * axis.num_ranks);
  auto output = at::empty(sizes_with_rows(input, chunk), input.options());
  auto pending = reduce_scatter_async(output, input, op, axis.group);
  const int64_t own = chunk_range(length, axis.num_ranks, axis.rank).length;
  return {.collective = std::move(pending),
          .finish = [output, input, dim, own] { return output.narrow(0, 0, own).movedim(0, dim).contiguous(); }};
}

/// Redistributes Shard(from) with global size `from_length` to Shard(to). Every rank sends one piece to every other.
/// All sizes follow from the global sizes, so none are exchanged.
StepInFlight all_to_all_dim(const at::Tensor& local, int64_t from, int64_t from_length, int64_t to,
                            const AxisView& axis) {
  const int64_t to_length = local.size(to);
  const int64_t own_to = chunk_range(to_length, axis.num_ranks, axis.rank).length;
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> sent, received;
  std::vector<std::vector<int64_t>> received_sizes;
  int64_t total = 0;
  for (int64_t peer = 0; peer < axis.num_ranks; ++peer) {
    const auto range = chunk_range(to_length, axis.num_ranks, peer);
    pieces.push_back(local.narrow(to, range.offset, range.length).reshape({-1}));
    sent.push_back(pieces.back().numel());
    auto sizes = local.sizes().vec();
    sizes[static_cast<size_t>(from)] = chunk_range(from_length, axis.num_ranks, peer).length;
    sizes[static_cast<size_t>(to)] = own_to;
    received.push_back(c10::multiply_integers(sizes));
    total += received.back();
    received_sizes.push_back(std::move(sizes));
  }
  auto output = at::empty({total}, local.options());
  const auto input = at::cat(pieces);
  auto pending = all_to_all_async(output, input, received, sent, axis.group);
  return {.collective = std::move(pending), .finish = [output, input, received, received_sizes, from] {
            auto parts = output.split_with_sizes(received);
            for (size_t peer = 0; peer < parts.size(); ++peer) {
              parts[peer] = parts[peer].view(received_sizes[peer]);
            }
            return at::cat(parts, from);
          }};
}

/// Converts the terms of a Partial p-norm, the root of a sum of powers. Powers may exceed 16 bits where norms do not.
at::Tensor norms_to_powers(const at::Tensor& norms, double p) {
  return norms.to(at::toOpMathType(norms.scalar_type())).pow(p).contiguous();
}

at::Tensor powers_to_norms(const at::Tensor& powers, double p, at::ScalarType dtype) {
  return powers.pow(1.0 / p).to(dtype);
}

/// Returns whether there are several terms. A single one is the value itself, and may have been written.
bool is_norm_of_terms(const Placement& placement, const AxisView& axis) {
  return placement.is_norm_partial() && axis.num_ranks > 1;
}

ReduceOp collective_op(const Placement& pending) {
  return pending.is_norm_partial() ? ReduceOp::Sum : pending.reduce_op();
}

StepInFlight reduce_partial(const at::Tensor& local, const Placement& from, const AxisView& axis) {
  if (!is_norm_of_terms(from, axis)) {
    const auto result = local.clone(at::MemoryFormat::Contiguous);
    return {.collective = all_reduce_async(result, collective_op(from), axis.group),
            .finish = [result] { return result; }};
  }
  const double p = from.norm_type();
  const auto sum = norms_to_powers(local, p);
  return {.collective = all_reduce_async(sum, ReduceOp::Sum, axis.group),
          .finish = [sum, p, dtype = local.scalar_type()] { return powers_to_norms(sum, p, dtype); }};
}

StepInFlight scatter_partial(const at::Tensor& local, const Placement& from, int64_t dim, const AxisView& axis) {
  if (!is_norm_of_terms(from, axis)) {
    return reduce_scatter_dim(local, dim, collective_op(from), axis);
  }
  const double p = from.norm_type();
  auto sum = reduce_scatter_dim(norms_to_powers(local, p), dim, ReduceOp::Sum, axis);
  return {.collective = std::move(sum.collective),
          .finish = [finish = std::move(sum.finish), p, dtype = local.scalar_type()] {
            return powers_to_norms(finish(), p, dtype);
          }};
}

/// Turns a value that all ranks hold into terms of a reduction. If the op is not idempotent, the first rank keeps the
/// value, and the others get the neutral element.
at::Tensor make_partial(const at::Tensor& local, const Placement& to, const AxisView& axis) {
  const bool every_rank_keeps =
      to.is_partial(ReduceOp::Avg) || to.is_partial(ReduceOp::Min) || to.is_partial(ReduceOp::Max);
  if (every_rank_keeps || axis.rank == 0) {
    return local.clone(at::MemoryFormat::Contiguous);  // writes to the result must not reach the source
  }
  auto neutral = at::zeros_like(local, local.options(), at::MemoryFormat::Contiguous);
  return to.is_partial(ReduceOp::Product) ? neutral.fill_(1) : neutral;
}

at::Tensor pad_to_partial(const at::Tensor& local, int64_t dim, int64_t length, const AxisView& axis) {
  auto sizes = local.sizes().vec();
  sizes[static_cast<size_t>(dim)] = length;
  auto result = at::zeros(sizes, local.options());
  const auto own = chunk_range(length, axis.num_ranks, axis.rank);
  result.narrow(dim, own.offset, own.length).copy_(local);
  return result;
}

/// Returns the size of `dim` that the ranks along `axis` share: the global size as sharded by the other axes.
int64_t shared_length(const DTensorSpec& spec, Placements current, size_t axis, int64_t dim) {
  current[axis] = Replicate();
  return local_range(spec.sizes()[static_cast<size_t>(dim)], dim, current, spec.position()).length;
}

/// Returns the step's result without data if `local` has none; nothing is sent.
at::Tensor meta_result(const at::Tensor& local, const RedistributeStep& step, const DTensorSpec& spec,
                       const Placements& current) {
  return at::empty(local_sizes(spec.sizes(), after_step(current, step), spec.position()), local.options());
}

}  // namespace

StepInFlight start_step(const at::Tensor& local, const RedistributeStep& step, const DTensorSpec& spec,
                        const Placements& current) {
  if (local.is_meta()) {
    return done(meta_result(local, step, spec, current));
  }
  const auto position = spec.position();
  const AxisView axis{.group = spec.mesh().group(static_cast<int64_t>(step.axis)),
                      .num_ranks = position.axis_sizes[step.axis],
                      .rank = position.coordinate[step.axis]};
  switch (step.kind) {
    case RedistributeStep::Kind::AllGather: {
      const int64_t dim = step.from.dim();
      return all_gather_dim(local, dim, shared_length(spec, current, step.axis, dim), axis);
    }
    case RedistributeStep::Kind::AllToAll: {
      const int64_t dim = step.from.dim();
      return all_to_all_dim(local, dim, shared_length(spec, current, step.axis, dim), step.to.dim(), axis);
    }
    case RedistributeStep::Kind::ReduceScatter:
      return scatter_partial(local, step.from, step.to.dim(), axis);
    case RedistributeStep::Kind::AllReduce:
      return reduce_partial(local, step.from, axis);
    case RedistributeStep::Kind::Chunk: {
      const int64_t dim = step.to.dim();
      const auto own = chunk_range(local.size(dim), axis.num_ranks, axis.rank);
      return done(local.narrow(dim, own.offset, own.length).clone(at::MemoryFormat::Contiguous));
    }
    case RedistributeStep::Kind::MakePartial:
      return done(make_partial(local, step.to, axis));
    case RedistributeStep::Kind::PadToPartial: {
      const int64_t dim = step.from.dim();
      return done(pad_to_partial(local, dim, shared_length(spec, current, step.axis, dim), axis));
    }
  }
  TESSERA_ASSERT(false, "step kind {}", static_cast<int>(step.kind));
}

}  // namespace tessera
