// What the "shm" backend decides by integers alone: where cells lie, and what moves in which step.

#include "comm/shm_plan.h"

#include <fmt/ranges.h>

#include <vector>

#include "comm/cell_header.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::Equals;

constexpr int64_t kCell = ShmLayout::kCellBytes;

std::vector<std::string> texts(const c10::SmallVector<ByteRange, 4>& ranges, int64_t t, int64_t chunk) {
  std::vector<std::string> result;
  for (const ByteRange& range : ranges) {
    const ByteRange piece = range.piece(t, chunk);
    result.push_back(fmt::format("{}+{}", piece.begin, piece.bytes));
  }
  return result;
}

TEST_CASE("cells and control blocks do not overlap, and lie on their alignment") {
  for (const int64_t ranks : {1, 2, 3, 64}) {
    const ShmLayout layout{.ranks = ranks};
    CHECK(layout.control_offset(0) == ShmLayout::kFailureBytes);
    CHECK(layout.cell_offset(0, 0) >= layout.control_offset(ranks));
    CHECK(layout.cell_offset(0, 0) % ShmLayout::kPage == 0);
    CHECK(layout.cell_offset(0, ShmLayout::kCells) == layout.cell_offset(0, 0));
    CHECK(layout.cell_stride() >= layout.header_bytes() + kCell);
    CHECK(layout.cell_offset(ranks - 1, ShmLayout::kCells - 1) + layout.cell_stride() == layout.total_bytes());
    CHECK(layout.part_bytes() * ranks <= kCell);
    CHECK(layout.part_bytes() % ShmLayout::kAlignment == 0);
    CHECK(layout.header_bytes() >= ShmLayout::kAlignment + 16 * ranks);
  }
}

TEST_CASE("an all_gather is cut into whole cells and a rest") {
  const CallShape call = {
      .kind = Collective::AllGather, .dtype = c10::kByte, .output = 2 * kCell + 20, .input = kCell + 10};
  const ShmPlan plan = plan_call(call, 1, {.ranks = 2});
  REQUIRE(plan.phases.size() == 1);
  const ShmPhase& phase = plan.phases[0];
  CHECK(phase.steps == 2);
  CHECK_THAT(texts(phase.sent, 1, phase.chunk), Equals(std::vector<std::string>{fmt::format("{}+10", kCell)}));
  CHECK_THAT(texts(phase.received, 1, phase.chunk),
             Equals(std::vector<std::string>{fmt::format("{}+10", kCell), fmt::format("{}+10", 2 * kCell + 10)}));
  CHECK_THAT(texts(phase.received, 2, phase.chunk),
             Equals(std::vector<std::string>{fmt::format("{}+0", kCell + 10), fmt::format("{}+0", 2 * kCell + 20)}));
}

TEST_CASE("a large all_reduce reduces parts and gathers them; the last may be short, or empty") {
  // 4 ranks, 20,001 x 2 floats and one more: parts of 10,001 but for the last.
  const CallShape call = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 40003};
  const ShmPlan plan = plan_call(call, 3, {.ranks = 4});
  REQUIRE(plan.phases.size() == 2);
  CHECK(plan.phases[0].reduces);
  CHECK(plan.phases[1].after_previous);
  CHECK_THAT(texts(plan.phases[0].sent, 0, 1000000),
             Equals(std::vector<std::string>{"0+40004", "40004+40004", "80008+40004", "120012+40000"}));
  CHECK_THAT(texts(plan.phases[0].received, 0, 1000000), Equals(std::vector<std::string>(4, "120012+40000")));
  CHECK_THAT(texts(plan.phases[1].sent, 0, 1000000), Equals(std::vector<std::string>{"120012+40000"}));
  const CallShape few = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 8};
  CHECK(plan_call(few, 0, {.ranks = 4}).phases.size() == 1);
}

TEST_CASE("every call has a step, so that ranks that call different things meet") {
  for (const Collective kind : {Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce,
                                Collective::Broadcast, Collective::Barrier}) {
    const CallShape call = {.kind = kind, .dtype = c10::kFloat, .output = 0, .input = 0};
    CHECK(plan_call(call, 0, {.ranks = 2}).phases[0].steps == 1);
  }
}

TEST_CASE("headers: same calls agree, others are told apart, all_to_all on the most steps") {
  const auto compare = [](const CallShape& first, int64_t steps, const CallShape& second, int64_t more_steps) {
    std::vector<char> a(4096), b(4096);
    write_header(a.data(), first, steps);
    write_header(b.data(), second, more_steps);
    return compare_headers({a.data(), b.data()});
  };
  const CallShape sum = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 4};
  CHECK(compare(sum, 1, sum, 1).mismatch.empty());
  CallShape product = sum;
  product.op = ReduceOp::Product;
  CHECK(compare(sum, 1, product, 1).mismatch ==
        "the ranks called different collectives: rank 0: all_reduce(Sum, Float[4]); rank 1: all_reduce(Product, "
        "Float[4])");
  CallShape to = {.kind = Collective::AllToAll, .dtype = c10::kInt, .output = 3, .input = 3};
  to.input_splits = {1, 2};
  to.output_splits = {1, 2};
  CallShape from = {.kind = Collective::AllToAll, .dtype = c10::kInt, .output = 6, .input = 6};
  from.input_splits = {2, 4};
  from.output_splits = {2, 4};
  const HeaderAgreement agreed = compare(to, 1, from, 5);
  CHECK(agreed.mismatch.empty());
  CHECK(agreed.steps == 5);
  from.output_splits = {3, 3};
  CHECK(compare(to, 1, from, 5).mismatch == "all_to_all: rank 0 sends 2 elements to rank 1, which expects 3");
}

}  // namespace
}  // namespace tessera
