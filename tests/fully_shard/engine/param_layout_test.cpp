#include "fully_shard/layout/param_layout.h"

#include <ostream>

#include "third_party/catch2/catch.h"

namespace tessera {

// In the namespace of the types, where Catch2's messages look for them.
std::ostream& operator<<(std::ostream& out, const BlockCopy& copy) {
  return out << "{flat " << copy.flat_offset << " by " << copy.flat_stride << ", param " << copy.param_offset << " by "
             << copy.param_stride << ", " << copy.rows << " x " << copy.cols << "}";
}

std::ostream& operator<<(std::ostream& out, const FlatRange& range) {
  return out << "{" << range.numel << " at " << range.offset << "}";
}

TEST_CASE("the layout of the header's example") {
  const auto layout = make_param_layout({{5, 3}, {2}}, 2);
  CHECK(layout.shard_numel == 24);
  CHECK(layout.num_ranks == 2);
  REQUIRE(layout.slots.size() == 2);
  CHECK(layout.slots[0] == ParamSlot{.rows = 5, .row_numel = 3, .chunk_numel = 9, .offset = 0});
  CHECK(layout.slots[1] == ParamSlot{.rows = 2, .row_numel = 1, .chunk_numel = 1, .offset = 16});
  CHECK(layout.slots[0].rows_on(1, 2) == DimRange{.offset = 3, .length = 2});
}

TEST_CASE("parameters shorter than the mesh, and empty ones") {
  const auto layout = make_param_layout({{2, 3}, {0, 4}, {1}}, 4);
  CHECK(layout.slots[0] == ParamSlot{.rows = 2, .row_numel = 3, .chunk_numel = 3, .offset = 0});
  CHECK(layout.slots[1] == ParamSlot{.rows = 0, .row_numel = 4, .chunk_numel = 0, .offset = 8});
  CHECK(layout.slots[2] == ParamSlot{.rows = 1, .row_numel = 1, .chunk_numel = 1, .offset = 8});
  CHECK(layout.shard_numel == 16);
  CHECK(layout.slots[0].rows_on(3, 4).length == 0);
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
        CHECK(slot.rows_on(rank, ranks).length * slot.row_numel <= slot.chunk_numel);
        rows += slot.rows_on(rank, ranks).length;
      }
      CHECK(rows == slot.rows);
    }
    CHECK(end <= layout.shard_numel);
  }
}

TEST_CASE("copies of the header's example: the full chunk and the rest of each parameter") {
  const auto layout = make_param_layout({{5, 3}, {2}}, 2);
  CHECK(layout.slots[0].full_chunks() == 1);
  CHECK(layout.slots[0].rest_numel() == 6);
  // 32 elements a rank in the buffer: the flat shard and 8 more.
  CHECK(layout.copies(layout.slots[0], 32) ==
        std::vector<BlockCopy>{
            {.flat_offset = 0, .flat_stride = 32, .param_offset = 0, .param_stride = 9, .rows = 1, .cols = 9},
            {.flat_offset = 32, .flat_stride = 6, .param_offset = 9, .param_stride = 6, .rows = 1, .cols = 6}});
  CHECK(layout.copies(layout.slots[1], 32) ==
        std::vector<BlockCopy>{
            {.flat_offset = 16, .flat_stride = 32, .param_offset = 0, .param_stride = 1, .rows = 2, .cols = 1}});
  CHECK(layout.unused(32) == std::vector<FlatRange>{{.offset = 9, .numel = 7},
                                                    {.offset = 17, .numel = 7},
                                                    {.offset = 38, .numel = 10},
                                                    {.offset = 49, .numel = 7}});
}

TEST_CASE("a parameter that is sharded on dim 1") {
  // [2, 3, 2] over 2 ranks on dim 1: 2 columns and 1 column, each of 2 elements, for both rows.
  const auto layout = make_param_layout({{2, 3, 2}}, 2, {1});
  const auto& slot = layout.slots[0];
  CHECK(slot == ParamSlot{.outer = 2, .rows = 3, .row_numel = 2, .chunk_numel = 8, .offset = 0});
  CHECK(slot.numel_on(0, 2) == 8);
  CHECK(slot.numel_on(1, 2) == 4);
  CHECK(layout.copies(slot, 8) ==
        std::vector<BlockCopy>{
            {.flat_offset = 0, .flat_stride = 4, .param_offset = 0, .param_stride = 6, .rows = 2, .cols = 4},
            {.flat_offset = 8, .flat_stride = 2, .param_offset = 4, .param_stride = 6, .rows = 2, .cols = 2}});
}

TEST_CASE("copies and unused ranges touch every element once, on both sides") {
  const std::vector<std::vector<int64_t>> shapes = {{17, 13}, {13}, {7, 2, 2}, {2, 5, 3}, {3, 1, 4}, {0, 4}};
  const std::vector<int64_t> dims = {0, 0, 2, 1, 0, 1};
  for (int64_t ranks = 1; ranks <= 6; ++ranks) {
    CAPTURE(ranks);
    const auto layout = make_param_layout(shapes, ranks, dims);
    const int64_t rank_numel = layout.shard_numel + 8;
    std::vector<int> flat(static_cast<size_t>(ranks * rank_numel), 0);
    for (const auto& slot : layout.slots) {
      std::vector<int> param(static_cast<size_t>(slot.numel()), 0);
      for (const auto& copy : layout.copies(slot, rank_numel)) {
        for (int64_t row = 0; row < copy.rows; ++row) {
          for (int64_t col = 0; col < copy.cols; ++col) {
            ++flat.at(static_cast<size_t>(copy.flat_offset + row * copy.flat_stride + col));
            ++param.at(static_cast<size_t>(copy.param_offset + row * copy.param_stride + col));
          }
        }
      }
      CHECK(param == std::vector<int>(param.size(), 1));
    }
    for (const auto& range : layout.unused(rank_numel)) {
      for (int64_t i = 0; i < range.numel; ++i) {
        ++flat.at(static_cast<size_t>(range.offset + i));
      }
    }
    for (size_t i = 0; i < flat.size(); ++i) {
      CHECK(flat[i] == (static_cast<int64_t>(i) % rank_numel < layout.shard_numel ? 1 : 0));
    }
  }
}

}  // namespace tessera
