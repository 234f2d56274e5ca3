#include "dtensor/spec/redistribute_plan.h"

#include <algorithm>

#include "base/error.h"

namespace tessera {

namespace {

using Kind = RedistributeStep::Kind;

using Axes = c10::SmallVector<size_t, 4>;

/// Returns the axes that shard `dim`, outermost first.
Axes sharding_axes(const Placements& placements, int64_t dim) {
  Axes axes;
  for (const size_t axis : shard_order(placements)) {
    if (placements[axis].is_shard(dim)) {
      axes.push_back(axis);
    }
  }
  return axes;
}

/// Returns the axes that shard `dim` outside `axis`, outermost first.
Axes outer_sharding_axes(const Placements& placements, int64_t dim, size_t axis) {
  Axes axes = sharding_axes(placements, dim);
  axes.resize(static_cast<size_t>(std::find(axes.begin(), axes.end(), axis) - axes.begin()));
  return axes;
}

/// An axis can keep its sharding only if all axes that shard its dim outside it do.
bool shard_stays(const Placements& from, const Placements& to, size_t axis) {
  if (!from[axis].is_shard() || !to[axis].is_shard(from[axis].dim())) {
    return false;
  }
  const int64_t dim = from[axis].dim();
  return outer_sharding_axes(from, dim, axis) == outer_sharding_axes(to, dim, axis);
}

/// Returns whether to[axis]'s dim is now sharded by exactly the axes that must be outside `axis`.
bool can_shard_now(const Placements& current, const Placements& to, size_t axis) {
  return sharding_axes(current, to[axis].dim()) == outer_sharding_axes(to, to[axis].dim(), axis);
}

class Planner {
 public:
  Planner(const Placements& from, const Placements& to) : current_(from), from_(from), to_(to) {}

  std::vector<RedistributeStep> run() {
    // Steps that shrink the tensor precede those that enlarge it.
    for (const size_t axis : shard_order(to_)) {
      if (!from_[axis].is_shard() && can_shard_now(current_, to_, axis)) {
        finish(axis);
      }
    }
    for (size_t axis = 0; axis < from_.size(); ++axis) {
      if (from_[axis].is_partial() && !to_[axis].is_shard() && from_[axis] != to_[axis]) {
        move(axis, Kind::AllReduce, Replicate());
      }
    }
    const auto cuts = shard_order(from_);
    for (size_t i = cuts.size(); i-- > 0;) {
      undo_shard(cuts[i]);
    }
    for (const size_t axis : shard_order(to_)) {
      finish(axis);
    }
    for (size_t axis = 0; axis < from_.size(); ++axis) {
      finish(axis);
    }
    return std::move(steps_);
  }

 private:
  void move(size_t axis, Kind kind, const Placement& to) {
    steps_.push_back({.kind = kind, .axis = axis, .from = current_[axis], .to = to});
    current_ = after_step(std::move(current_), steps_.back());
  }

  void undo_shard(size_t axis) {
    if (shard_stays(from_, to_, axis)) {
      return;
    }
    if (to_[axis].is_shard() && !to_[axis].is_shard(from_[axis].dim()) && can_shard_now(current_, to_, axis)) {
      move(axis, Kind::AllToAll, to_[axis]);
    } else if (to_[axis].is_partial(ReduceOp::Sum)) {
      move(axis, Kind::PadToPartial, to_[axis]);
    } else {
      move(axis, Kind::AllGather, Replicate());
    }
  }

  void finish(size_t axis) {
    if (current_[axis].without_order() == to_[axis].without_order()) {
      return;
    }
    if (current_[axis].is_partial()) {
      TESSERA_ASSERT(to_[axis].is_shard(), "{} left for axis {}", current_[axis], axis);
      move(axis, Kind::ReduceScatter, to_[axis]);
    } else {
      TESSERA_ASSERT(current_[axis].is_replicate(), "{} left for axis {}", current_[axis], axis);
      move(axis, to_[axis].is_shard() ? Kind::Chunk : Kind::MakePartial, to_[axis]);
    }
  }

  Placements current_;
  const Placements& from_;
  const Placements& to_;
  std::vector<RedistributeStep> steps_;
};

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::AllGather:
      return "all_gather";
    case Kind::AllToAll:
      return "all_to_all";
    case Kind::ReduceScatter:
      return "reduce_scatter";
    case Kind::AllReduce:
      return "all_reduce";
    case Kind::Chunk:
      return "chunk";
    case Kind::MakePartial:
      return "make_partial";
    case Kind::PadToPartial:
      return "pad_to_partial";
  }
  return "?";
}

}  // namespace

Placements after_step(Placements current, const RedistributeStep& step) {
  current[step.axis] = step.to.without_order();
  if (step.to.is_shard()) {
    int innermost = 0;
    for (size_t axis = 0; axis < current.size(); ++axis) {
      if (axis != step.axis && current[axis].is_shard(step.to.dim())) {
        innermost = std::max(innermost, current[axis].order() + 1);
      }
    }
    current[step.axis] = Shard(step.to.dim(), innermost);
  }
  return current;
}

std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to) {
  TESSERA_ASSERT(from.size() == to.size(), "{} → {}", to_string(from), to_string(to));
  return Planner(from, to).run();
}

std::string to_string(const std::vector<RedistributeStep>& plan) {
  std::string text;
  for (const auto& step : plan) {
    text += fmt::format("{}{}(axis {}: {} → {})", text.empty() ? "" : ", ", kind_name(step.kind), step.axis, step.from,
                        step.to);
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace tessera
