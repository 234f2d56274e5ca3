// Which unit is expected next.

#include "fully_shard/engine/schedule.h"

#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using UnitOrder = std::vector<int64_t>;

void forward(Schedule& schedule, const UnitOrder& begins, const UnitOrder& ends) {
  schedule.begin_forward();
  for (const auto unit : begins) {
    schedule.record_forward(unit);
  }
  for (const auto unit : ends) {
    schedule.record_forward_end(unit);
  }
}

void backward(Schedule& schedule, const UnitOrder& order) {
  schedule.begin_backward();
  for (const auto unit : order) {
    schedule.record_backward(unit);
  }
}

}  // namespace

TEST_CASE("the first forward expects nothing, the second what the first did") {
  Schedule schedule;
  forward(schedule, {0, 1, 2, 1, 3}, {});
  CHECK(schedule.next_in_forward(0) == std::nullopt);
  CHECK(schedule.forward_order() == UnitOrder{0, 1, 2, 3});
  schedule.begin_forward();
  CHECK(schedule.next_in_forward(0) == 1);
  CHECK(schedule.next_in_forward(2) == 3);
  CHECK(schedule.next_in_forward(3) == std::nullopt);
  CHECK(schedule.next_in_forward(7) == std::nullopt);
}

TEST_CASE("the first backward expects the reverse of forward's ends") {
  Schedule schedule;
  forward(schedule, {0, 1, 2, 3}, {1, 2, 3, 0});
  schedule.begin_backward();
  CHECK(schedule.next_in_backward(0) == 3);
  CHECK(schedule.next_in_backward(3) == 2);
  CHECK(schedule.next_in_backward(1) == std::nullopt);
}

TEST_CASE("later backwards follow the last one, and the reverse of forward for what it did not see") {
  Schedule schedule;
  forward(schedule, {0, 1, 2, 3}, {1, 2, 3, 0});
  backward(schedule, {0, 2, 3});
  forward(schedule, {0, 1, 2, 3}, {1, 2, 3, 0});
  schedule.begin_backward();
  CHECK(schedule.next_in_backward(0) == 2);
  CHECK(schedule.next_in_backward(2) == 3);
  CHECK(schedule.next_in_backward(3) == std::nullopt);
  CHECK(schedule.next_in_backward(1) == std::nullopt);
}

TEST_CASE("an abandoned iteration leaves the order of the one before") {
  Schedule schedule;
  forward(schedule, {0, 1, 2}, {});
  forward(schedule, {0, 2}, {});
  schedule.abandon();
  schedule.begin_forward();
  CHECK(schedule.next_in_forward(0) == 1);
}

}  // namespace tessera
