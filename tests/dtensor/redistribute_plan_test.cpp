#include "dtensor/redistribute_plan.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

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
  CHECK(plan({Shard(0)}, {Partial()}) ==
        "all_gather(axis 0: Shard(0) → Replicate()), make_partial(axis 0: Replicate() → Partial(Sum))");
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

namespace {

/// Follows a plan with nothing but the meaning of each step; returns where it ends, or says what is wrong.
std::string follow(const std::vector<RedistributeStep>& steps, Placements& current) {
  using Kind = RedistributeStep::Kind;
  for (const auto& step : steps) {
    if (step.from != current[step.axis] || step.from == step.to) {
      return "starts from another placement";
    }
    // A cut is made and undone innermost: no later axis may hold a cut of the same dim meanwhile.
    for (const auto& side : {step.from, step.to}) {
      for (size_t later = step.axis + 1; side.is_shard() && later < current.size(); ++later) {
        if (current[later].is_shard(side.dim())) {
          return "touches an outer cut";
        }
      }
    }
    const bool fits = (step.kind == Kind::AllGather && step.from.is_shard() && step.to.is_replicate()) ||
                      (step.kind == Kind::AllToAll && step.from.is_shard() && step.to.is_shard()) ||
                      (step.kind == Kind::ReduceScatter && step.from.is_partial() && step.to.is_shard()) ||
                      (step.kind == Kind::AllReduce && step.from.is_partial() && step.to.is_replicate()) ||
                      (step.kind == Kind::Chunk && step.from.is_replicate() && step.to.is_shard()) ||
                      (step.kind == Kind::MakePartial && step.from.is_replicate() && step.to.is_partial());
    if (!fits) {
      return "the step's kind does not do this";
    }
    current[step.axis] = step.to;
  }
  return "";
}

std::vector<Placements> all_placements(size_t axes) {
  const std::vector<Placement> choices{Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::Max)};
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
    const size_t stride = axes == 4 ? 7 : 1;
    size_t wrong = 0;
    std::string first;
    for (size_t i = 0; i < all.size(); ++i) {
      for (size_t j = i % stride; j < all.size(); j += stride) {
        const auto steps = plan_redistribute(all[i], all[j]);
        Placements current = all[i];
        auto problem = follow(steps, current);
        problem = problem.empty() && current != all[j] ? "ends at " + to_string(current) : problem;
        if (!problem.empty() && wrong++ == 0) {
          first = to_string(all[i]) + " to " + to_string(all[j]) + ": " + to_string(steps) + ": " + problem;
        }
      }
    }
    INFO(first);
    CHECK(wrong == 0);
  }
}
