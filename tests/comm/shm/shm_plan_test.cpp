// What the "shm" backend decides by integers alone: where slots lie, and what moves in which step.

#include "comm/shm/shm_plan.h"

#include <fmt/ranges.h>

#include <vector>

#include "comm/shm/slot_header.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::Equals;

constexpr int64_t kSlot = ShmLayout::kSlotBytes;

std::vector<std::string> texts(const c10::SmallVector<ByteRange, 4>& ranges, int64_t t, int64_t chunk) {
  std::vector<std::string> result;
  for (const ByteRange& range : ranges) {
    const ByteRange piece = range.piece(t, chunk);
    result.push_back(fmt::format("{}+{}", piece.begin, piece.bytes));
  }
  return result;
}

TEST_CASE("slots and control blocks do not overlap, and lie on their alignment") {
  for (const int64_t ranks : {1, 2, 3, 64}) {
    const ShmLayout layout{.ranks = ranks};
    CHECK(layout.control_offset(0) == ShmLayout::kFailureBytes);
    CHECK(layout.slot_offset(0, 0) >= layout.control_offset(ranks));
    CHECK(layout.slot_offset(0, 0) % ShmLayout::kPage == 0);
    CHECK(layout.slot_offset(0, ShmLayout::kSlots) == layout.slot_offset(0, 0));
    CHECK(layout.slot_stride() >= layout.header_bytes() + kSlot);
    CHECK(layout.slot_offset(ranks - 1, ShmLayout::kSlots - 1) + layout.slot_stride() == layout.total_bytes());
    CHECK(layout.part_bytes() * ranks <= kSlot);
    CHECK(layout.part_bytes() % ShmLayout::kAlignment == 0);
    CHECK(layout.header_bytes() >= ShmLayout::kAlignment + 16 * ranks);
  }
}

TEST_CASE("an all_gather is cut into whole slots and a rest") {
  const CollectiveSignature call = {
      .kind = Collective::AllGather, .dtype = c10::kByte, .output = 2 * kSlot + 20, .input = kSlot + 10};
  const ShmPlan plan = plan_call(call, 1, {.ranks = 2});
  REQUIRE(plan.phases.size() == 1);
  const ShmPhase& phase = plan.phases[0];
  CHECK(phase.steps == 2);
  CHECK_THAT(texts(phase.sent, 1, phase.chunk), Equals(std::vector<std::string>{fmt::format("{}+10", kSlot)}));
  CHECK_THAT(texts(phase.received, 1, phase.chunk),
             Equals(std::vector<std::string>{fmt::format("{}+10", kSlot), fmt::format("{}+10", 2 * kSlot + 10)}));
  CHECK_THAT(texts(phase.received, 2, phase.chunk),
             Equals(std::vector<std::string>{fmt::format("{}+0", kSlot + 10), fmt::format("{}+0", 2 * kSlot + 20)}));
}

TEST_CASE("a large all_reduce reduces parts and gathers them; the last may be short, or empty") {
  // 4 ranks, 20,001 x 2 floats and one more: parts of 10,001 but for the last.
  const CollectiveSignature call = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 40003};
  const ShmPlan plan = plan_call(call, 3, {.ranks = 4});
  REQUIRE(plan.phases.size() == 2);
  CHECK(plan.phases[0].reduces);
  CHECK(plan.phases[1].after_previous);
  CHECK_THAT(texts(plan.phases[0].sent, 0, 1000000),
             Equals(std::vector<std::string>{"0+40004", "40004+40004", "80008+40004", "120012+40000"}));
  CHECK_THAT(texts(plan.phases[0].received, 0, 1000000), Equals(std::vector<std::string>(4, "120012+40000")));
  CHECK_THAT(texts(plan.phases[1].sent, 0, 1000000), Equals(std::vector<std::string>{"120012+40000"}));
  const CollectiveSignature few = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 8};
  CHECK(plan_call(few, 0, {.ranks = 4}).phases.size() == 1);
}

TEST_CASE("messages have room of their own behind the group's memory, each way of each pair") {
  for (const int64_t ranks : {2, 3, 64, 4096}) {
    const ShmLayout layout{.ranks = ranks};
    const int64_t room = ShmLayout::of_messages().total_bytes();
    CHECK(layout.messages_offset(0, 0) >= layout.total_bytes());
    CHECK(layout.messages_offset(1, 0) % ShmLayout::kMapAlignment == 0);
    CHECK(layout.messages_offset(0, 1) + room <= layout.messages_offset(0, 2));
    CHECK(layout.messages_offset(0, ranks) == layout.messages_offset(1, 0));
    CHECK(layout.messages_offset(ranks - 1, ranks - 2) + room <= layout.file_bytes());
  }
}

TEST_CASE("a message goes from rank 0 of its memory to rank 1, in as many steps on both") {
  const CollectiveSignature send = {.kind = Collective::Send, .root = 5, .dtype = c10::kInt, .input = 100000};
  const CollectiveSignature recv = {.kind = Collective::Recv, .root = 2, .dtype = c10::kInt, .output = 100000};
  const ShmPhase sender = plan_call(send, 0, ShmLayout::of_messages()).phases[0];
  const ShmPhase receiver = plan_call(recv, 1, ShmLayout::of_messages()).phases[0];
  CHECK(sender.steps == 2);
  CHECK(receiver.steps == 2);
  CHECK_THAT(texts(sender.sent, 1, sender.chunk),
             Equals(std::vector<std::string>{fmt::format("{}+{}", kSlot, 400000 - kSlot)}));
  CHECK_THAT(texts(sender.received, 0, sender.chunk), Equals(std::vector<std::string>{"0+0", "0+0"}));
  CHECK_THAT(texts(receiver.sent, 0, receiver.chunk), Equals(std::vector<std::string>{"0+0"}));
  CHECK_THAT(texts(receiver.received, 0, receiver.chunk),
             Equals(std::vector<std::string>{fmt::format("0+{}", kSlot), "0+0"}));
}

TEST_CASE("every call has a step, so that ranks that call different things meet") {
  for (const Collective kind : {Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce,
                                Collective::Broadcast, Collective::Barrier, Collective::Send, Collective::Recv}) {
    const CollectiveSignature call = {.kind = kind, .dtype = c10::kFloat, .output = 0, .input = 0};
    CHECK(plan_call(call, 0, {.ranks = 2}).phases[0].steps == 1);
  }
}

TEST_CASE("headers: where an input is exposed, which the others need not do") {
  const CollectiveSignature call = {.kind = Collective::AllGather, .dtype = c10::kFloat, .output = 8, .input = 4};
  std::vector<char> exposes(4096), sends(4096);
  write_header(exposes.data(), call, 1, SharedPlace{.file = 5, .block = 1 << 20, .block_bytes = 1 << 16, .offset = 64});
  write_header(sends.data(), call, 1, std::nullopt);
  CHECK(compare_headers({exposes.data(), sends.data()}).mismatch.empty());
  CHECK_FALSE(read_exposed(sends.data()));
  const auto place = read_exposed(exposes.data());
  REQUIRE(place);
  CHECK(place->file == 5);
  CHECK(place->block == 1 << 20);
  CHECK(place->block_bytes == 1 << 16);
  CHECK(place->offset == 64);
  // A slot is used again.
  write_header(exposes.data(), {.kind = Collective::Barrier}, 1, std::nullopt);
  CHECK_FALSE(read_exposed(exposes.data()));
}

TEST_CASE("headers: same calls agree, others are told apart, all_to_all on the most steps") {
  const auto compare = [](const CollectiveSignature& first, int64_t steps, const CollectiveSignature& second,
                          int64_t more_steps) {
    std::vector<char> a(4096), b(4096);
    write_header(a.data(), first, steps, std::nullopt);
    write_header(b.data(), second, more_steps, std::nullopt);
    return compare_headers({a.data(), b.data()});
  };
  const CollectiveSignature sum = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 4};
  CHECK(compare(sum, 1, sum, 1).mismatch.empty());
  CollectiveSignature product = sum;
  product.op = ReduceOp::Product;
  CHECK(compare(sum, 1, product, 1).mismatch ==
        "the ranks called different collectives: rank 0: all_reduce(Sum, Float[4]); rank 1: all_reduce(Product, "
        "Float[4])");
  CollectiveSignature to = {.kind = Collective::AllToAll, .dtype = c10::kInt, .output = 3, .input = 3};
  to.input_splits = {1, 2};
  to.output_splits = {1, 2};
  CollectiveSignature from = {.kind = Collective::AllToAll, .dtype = c10::kInt, .output = 6, .input = 6};
  from.input_splits = {2, 4};
  from.output_splits = {2, 4};
  const HeaderAgreement agreed = compare(to, 1, from, 5);
  CHECK(agreed.mismatch.empty());
  CHECK(agreed.steps == 5);
  from.output_splits = {3, 3};
  CHECK(compare(to, 1, from, 5).mismatch == "all_to_all: rank 0 sends 2 elements to rank 1, which expects 3");
  const CollectiveSignature sent = {.kind = Collective::Send, .root = 3, .tag = 7, .dtype = c10::kInt, .input = 4};
  CollectiveSignature received = {.kind = Collective::Recv, .root = 1, .tag = 7, .dtype = c10::kInt, .output = 4};
  CHECK(compare(sent, 1, received, 1).mismatch.empty());
  received.tag = 8;
  CHECK(
      compare(sent, 1, received, 1).mismatch ==
      "what is sent is not what is received: rank 1: send(to rank 3, tag 7, Int[4]); rank 3: recv(from rank 1, tag 8, "
      "Int[4])");
}

}  // namespace
}  // namespace tessera
