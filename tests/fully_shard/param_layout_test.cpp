#include "fully_shard/param_layout.h"

#include "third_party/catch2/catch.h"

using namespace tessera;

TEST_CASE("the layout of the header's example") {
  const auto layout = make_param_layout({{5, 3}, {2}}, 2);
  CHECK(layout.shard_numel == 24);
  CHECK(layout.num_ranks == 2);
  REQUIRE(layout.slots.size() == 2);
  CHECK(layout.slots[0] == ParamSlot{.rows = 5, .row_numel = 3, .chunk_numel = 9, .offset = 0});
  CHECK(layout.slots[1] == ParamSlot{.rows = 2, .row_numel = 1, .chunk_numel = 1, .offset = 16});
  CHECK(layout.slots[0].rows_of(1, 2) == DimRange{.offset = 3, .length = 2});
}

TEST_CASE("parameters shorter than the mesh, and empty ones") {
  const auto layout = make_param_layout({{2, 3}, {0, 4}, {1}}, 4);
  CHECK(layout.slots[0] == ParamSlot{.rows = 2, .row_numel = 3, .chunk_numel = 3, .offset = 0});
  CHECK(layout.slots[1] == ParamSlot{.rows = 0, .row_numel = 4, .chunk_numel = 0, .offset = 8});
  CHECK(layout.slots[2] == ParamSlot{.rows = 1, .row_numel = 1, .chunk_numel = 1, .offset = 8});
  CHECK(layout.shard_numel == 16);
  CHECK(layout.slots[0].rows_of(3, 4).length == 0);
}

TEST_CASE("slots do not overlap and every element has one owner") {
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    const auto layout = make_param_layout({{17, 13}, {13}, {7, 2, 2}, {3}}, ranks);
    int64_t end = 0;
    for (const auto& slot : layout.slots) {
      CHECK(slot.offset >= end);
      CHECK(slot.offset % kSlotAlignment == 0);
      end = slot.offset + slot.chunk_numel;
      int64_t rows = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        CHECK(slot.rows_of(rank, ranks).length * slot.row_numel <= slot.chunk_numel);
        rows += slot.rows_of(rank, ranks).length;
      }
      CHECK(rows == slot.rows);
    }
    CHECK(end <= layout.shard_numel);
  }
}
