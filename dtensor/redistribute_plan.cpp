#include "dtensor/redistribute_plan.h"

#include "base/error.h"

namespace tessera {

namespace {

using Kind = RedistributeStep::Kind;

/// A cut can stay only if the cuts of the same dim before it stay too: whether axis `axis` of `from` is
/// part of the common prefix of both lists of axes that shard its dim.
bool shard_stays(const Placements& from, const Placements& to, size_t axis) {
  if (!from[axis].is_shard() || from[axis] != to[axis]) {
    return false;
  }
  const int64_t dim = from[axis].dim();
  for (size_t earlier = 0; earlier < axis; ++earlier) {
    if (from[earlier].is_shard(dim) != to[earlier].is_shard(dim)) {
      return false;
    }
  }
  return true;
}

/// Whether a new cut of `to[axis]`'s dim by `axis` would be innermost and all cuts before it are in place.
bool can_cut_now(const Placements& current, const Placements& to, size_t axis) {
  const int64_t dim = to[axis].dim();
  for (size_t other = 0; other < current.size(); ++other) {
    const bool wanted = other < axis && to[other].is_shard(dim);
    if (other != axis && current[other].is_shard(dim) != wanted) {
      return false;
    }
  }
  return true;
}

class Planner {
 public:
  Planner(const Placements& from, const Placements& to) : current_(from), from_(from), to_(to) {}

  std::vector<RedistributeStep> run() {
    // Reductions to Replicate come first: the tensor is smallest before any all-gather.
    for (size_t axis = 0; axis < from_.size(); ++axis) {
      if (from_[axis].is_partial() && !to_[axis].is_shard() && from_[axis] != to_[axis]) {
        move(axis, Kind::AllReduce, Replicate());
      }
    }
    for (size_t axis = from_.size(); axis-- > 0;) {
      undo_shard(axis);
    }
    for (size_t axis = 0; axis < from_.size(); ++axis) {
      finish(axis);
    }
    return std::move(steps_);
  }

 private:
  void move(size_t axis, Kind kind, const Placement& to) {
    steps_.push_back({.kind = kind, .axis = axis, .from = current_[axis], .to = to});
    current_[axis] = to;
  }

  void undo_shard(size_t axis) {
    if (!from_[axis].is_shard() || shard_stays(from_, to_, axis)) {
      return;
    }
    if (to_[axis].is_shard() && to_[axis] != from_[axis] && can_cut_now(current_, to_, axis)) {
      move(axis, Kind::AllToAll, to_[axis]);
    } else {
      move(axis, Kind::AllGather, Replicate());
    }
  }

  void finish(size_t axis) {
    if (current_[axis] == to_[axis]) {
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

const char* name_of(Kind kind) {
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
  }
  return "?";
}

}  // namespace

std::vector<RedistributeStep> plan_redistribute(const Placements& from, const Placements& to) {
  TESSERA_ASSERT(from.size() == to.size(), "{} → {}", to_string(from), to_string(to));
  return Planner(from, to).run();
}

std::string to_string(const std::vector<RedistributeStep>& plan) {
  std::string text;
  for (const auto& step : plan) {
    text += fmt::format("{}{}(axis {}: {} → {})", text.empty() ? "" : ", ", name_of(step.kind), step.axis, step.from,
                        step.to);
  }
  return text.empty() ? "nothing" : text;
}

}  // namespace tessera
