#include "dtensor/spec/redistribute_plan.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

std::string plan(const Placements& from, const Placements& to) {
  return to_string(plan_redistribute(from, to));
}

}  // namespace

TEST_CASE("plans on one axis", "[dtensor]") {
  CHECK(plan({Shard(0)}, {Shard(0)}) == "nothing");
  CHECK(plan({Shard(0)}, {Replicate()}) == "all_gather(axis 0: Shard(0) → Replicate())");
  CHECK(plan({Shard(0)}, {Shard(1)}) == "all_to_all(axis 0: Shard(0) → Shard(1))");
  CHECK(plan({Replicate()}, {Shard(1)}) == "chunk(axis 0: Replicate() → Shard(1))");
  CHECK(plan({Partial()}, {Replicate()}) == "all_reduce(axis 0: Partial(Sum) → Replicate())");
  CHECK(plan({Partial()}, {Shard(0)}) == "reduce_scatter(axis 0: Partial(Sum) → Shard(0))");
  CHECK(plan({Replicate()}, {Partial()}) == "make_partial(axis 0: Replicate() → Partial(Sum))");
  CHECK(plan({Shard(0)}, {Partial()}) == "pad_to_partial(axis 0: Shard(0) → Partial(Sum))");
  CHECK(plan({Shard(0)}, {Partial(ReduceOp::Max)}) ==
        "all_gather(axis 0: Shard(0) → Replicate()), make_partial(axis 0: Replicate() → Partial(Max))");
  CHECK(plan({Partial()}, {Partial(ReduceOp::Avg)}) ==
        "all_reduce(axis 0: Partial(Sum) → Replicate()), make_partial(axis 0: Replicate() → Partial(Avg))");
}

TEST_CASE("plans on two axes undo inner cuts before outer ones", "[dtensor]") {
  CHECK(plan({Shard(0), Shard(0)}, {Shard(0), Replicate()}) == "all_gather(axis 1: Shard(0) → Replicate())");
  CHECK(plan({Shard(0), Shard(0)}, {Replicate(), Shard(0)}) ==
        "all_gather(axis 1: Shard(0) → Replicate()), all_gather(axis 0: Shard(0) → Replicate()), "
        "chunk(axis 1: Replicate() → Shard(0))");
  CHECK(plan({Replicate(), Shard(0)}, {Shard(0), Shard(0)}) ==
        "all_gather(axis 1: Shard(0) → Replicate()), chunk(axis 0: Replicate() → Shard(0)), "
        "chunk(axis 1: Replicate() → Shard(0))");
  CHECK(plan({Shard(0), Shard(1)}, {Replicate(), Shard(1)}) == "all_gather(axis 0: Shard(0) → Replicate())");
  CHECK(plan({Shard(0), Partial()}, {Shard(0), Shard(0)}) == "reduce_scatter(axis 1: Partial(Sum) → Shard(0))");
  CHECK(plan({Partial(), Shard(0)}, {Replicate(), Replicate()}) ==
        "all_reduce(axis 0: Partial(Sum) → Replicate()), all_gather(axis 1: Shard(0) → Replicate())");
}

TEST_CASE("what shrinks the tensor comes before what grows it", "[dtensor]") {
  CHECK(plan({Partial(), Shard(1)}, {Shard(0), Replicate()}) ==
        "reduce_scatter(axis 0: Partial(Sum) → Shard(0)), all_gather(axis 1: Shard(1) → Replicate())");
  CHECK(plan({Replicate(), Shard(1)}, {Shard(0), Replicate()}) ==
        "chunk(axis 0: Replicate() → Shard(0)), all_gather(axis 1: Shard(1) → Replicate())");
}

TEST_CASE("an inner cut by an earlier axis is undone alone", "[dtensor]") {
  CHECK(plan({Shard(0, 1), Shard(0)}, {Replicate(), Shard(0)}) == "all_gather(axis 0: Shard(0, 1) → Replicate())");
  CHECK(plan({Partial(), Shard(0)}, {Shard(0, 1), Shard(0)}) == "reduce_scatter(axis 0: Partial(Sum) → Shard(0, 1))");
  CHECK(plan({Shard(0), Shard(0)}, {Shard(0, 1), Shard(0)}) ==
        "all_gather(axis 1: Shard(0) → Replicate()), all_gather(axis 0: Shard(0) → Replicate()), "
        "chunk(axis 1: Replicate() → Shard(0)), chunk(axis 0: Replicate() → Shard(0, 1))");
}

namespace {

/// The axes that cut each dim, outermost first, and what the others do.
struct Layout {
  std::vector<std::vector<size_t>> cuts;
  Placements placements;

  explicit Layout(const Placements& from) : cuts(2), placements(from) {
    for (const size_t axis : shard_order(from)) {
      cuts[static_cast<size_t>(from[axis].dim())].push_back(axis);
      placements[axis] = from[axis].without_order();
    }
  }
  bool operator==(const Layout&) const = default;
};

bool kind_does(const RedistributeStep& step) {
  switch (step.kind) {
    case RedistributeStep::Kind::AllGather:
      return step.from.is_shard() && step.to.is_replicate();
    case RedistributeStep::Kind::AllToAll:
      return step.from.is_shard() && step.to.is_shard() && !step.to.is_shard(step.from.dim());
    case RedistributeStep::Kind::ReduceScatter:
      return step.from.is_partial() && step.to.is_shard();
    case RedistributeStep::Kind::AllReduce:
      return step.from.is_partial() && step.to.is_replicate();
    case RedistributeStep::Kind::Chunk:
      return step.from.is_replicate() && step.to.is_shard();
    case RedistributeStep::Kind::MakePartial:
      return step.from.is_replicate() && step.to.is_partial();
    case RedistributeStep::Kind::PadToPartial:
      return step.from.is_shard() && step.to.is_partial(ReduceOp::Sum);
  }
  return false;
}

/// Follows a plan with nothing but the meaning of each step: a cut is made and undone innermost. Returns what is wrong.
std::string follow(const std::vector<RedistributeStep>& steps, Layout& layout) {
  for (const auto& step : steps) {
    auto& current = layout.placements[step.axis];
    if (step.from.without_order() != current || !kind_does(step)) {
      return "the step does not fit what is there";
    }
    if (current.is_shard()) {
      auto& cuts = layout.cuts[static_cast<size_t>(current.dim())];
      if (cuts.back() != step.axis) {
        return "undoes an outer cut";
      }
      cuts.pop_back();
    }
    current = step.to.without_order();
    if (current.is_shard()) {
      layout.cuts[static_cast<size_t>(current.dim())].push_back(step.axis);
    }
  }
  return "";
}

std::vector<Placements> all_placements(size_t axes) {
  const std::vector<Placement> choices{Replicate(), Shard(0), Shard(0, 1), Shard(1), Partial(), Partial(ReduceOp::Max)};
  std::vector<Placements> result{{}};
  for (size_t axis = 0; axis < axes; ++axis) {
    std::vector<Placements> longer;
    for (const auto& head : result) {
      for (const auto& choice : choices) {
        longer.push_back(head);
        longer.back().push_back(choice);
      }
    }
    result = std::move(longer);
  }
  return result;
}

}  // namespace

TEST_CASE("every plan ends at its target, on one to four axes", "[dtensor]") {
  for (size_t axes = 1; axes <= 4; ++axes) {
    const auto all = all_placements(axes);
    const size_t stride = axes == 4 ? 13 : 1;
    size_t wrong = 0;
    std::string first;
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = i % stride; j < all.size(); j += stride) {
        const auto steps = plan_redistribute(all[i], all[j]);
        Layout layout(all[i]);
        auto problem = follow(steps, layout);
        problem = problem.empty() && layout != Layout(all[j]) ? "ends elsewhere" : problem;
        if (!problem.empty() && wrong++ == 0) {
          first = to_string(all[i]) + " to " + to_string(all[j]) + ": " + to_string(steps) + ": " + problem;
        }
      }
    }
    INFO(first);
    CHECK(wrong == 0);
  }
}

}  // namespace tessera
