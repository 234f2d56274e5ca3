// Parts of tensors as integers.

#include "checkpoint/format/shard_slice.h"

#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "third_party/catch2/catch.h"

namespace tessera::dcp {

namespace {

std::vector<Run> runs_of(const ShardSlice& slice, const Sizes& tensor) {
  std::vector<Run> runs;
  for_each_run(slice, tensor, [&](const Run& run) { runs.push_back(run); });
  return runs;
}

}  // namespace

TEST_CASE("a slice is runs of the tensor's elements") {
  CHECK(runs_of({.offsets = {1, 0}, .sizes = {2, 3}}, {4, 5}) == std::vector<Run>{{5, 0, 3}, {10, 3, 3}});
  CHECK(runs_of({.offsets = {1, 0}, .sizes = {2, 5}}, {4, 5}) == std::vector<Run>{{5, 0, 10}});
  CHECK(runs_of({.offsets = {1, 1, 0}, .sizes = {2, 1, 4}}, {3, 2, 4}) == std::vector<Run>{{12, 0, 4}, {20, 4, 4}});
  CHECK(runs_of({.offsets = {0, 0, 1}, .sizes = {2, 2, 2}}, {2, 2, 3}) ==
        std::vector<Run>{{1, 0, 2}, {4, 2, 2}, {7, 4, 2}, {10, 6, 2}});
  CHECK(runs_of({.offsets = {}, .sizes = {}}, {}) == std::vector<Run>{{0, 0, 1}});
  CHECK(runs_of({.offsets = {4, 0}, .sizes = {0, 5}}, {4, 5}).empty());
}

TEST_CASE("the extent of a slice is from its first run to the end of its last") {
  CHECK(extent({.offsets = {1, 0}, .sizes = {2, 3}}, {4, 5}) == Run{5, 0, 8});
  CHECK(extent({.offsets = {1, 0}, .sizes = {2, 5}}, {4, 5}) == Run{5, 0, 10});
  CHECK(extent({.offsets = {0, 0, 1}, .sizes = {2, 2, 2}}, {2, 2, 3}) == Run{1, 0, 11});
  CHECK(extent({.offsets = {}, .sizes = {}}, {}) == Run{0, 0, 1});
  CHECK(extent({.offsets = {4, 0}, .sizes = {0, 5}}, {4, 5}) == Run{0, 0, 0});
}

TEST_CASE("blocks of a slice are its elements in order") {
  CHECK(split_slice({.offsets = {2, 1}, .sizes = {5, 3}}, 6) ==
        std::vector<ShardSlice>{{{2, 1}, {2, 3}}, {{4, 1}, {2, 3}}, {{6, 1}, {1, 3}}});
  CHECK(split_slice({.offsets = {0, 0}, .sizes = {1, 5}}, 2) ==
        std::vector<ShardSlice>{{{0, 0}, {1, 2}}, {{0, 2}, {1, 2}}, {{0, 4}, {1, 1}}});
  CHECK(split_slice({.offsets = {7, 0}, .sizes = {2, 3}}, 2).size() == 4);
  CHECK(split_slice({.offsets = {}, .sizes = {}}, 1) == std::vector<ShardSlice>{{{}, {}}});
  CHECK(split_slice({.offsets = {0}, .sizes = {0}}, 1).empty());
}

TEST_CASE("slices that have an element in common are found") {
  using Pair = std::pair<size_t, size_t>;
  const std::vector<ShardSlice> tiles = {{{0, 0}, {2, 3}}, {{2, 0}, {1, 5}}, {{0, 3}, {2, 2}}};
  const auto with = [&](const ShardSlice& slice) {
    auto slices = tiles;
    slices.push_back(slice);
    return find_overlap(slices);
  };
  CHECK(find_overlap({}) == std::nullopt);
  CHECK(find_overlap(tiles) == std::nullopt);
  CHECK(with({{3, 0}, {1, 5}}) == std::nullopt);
  CHECK(with({{1, 3}, {0, 2}}) == std::nullopt);  // has none
  CHECK(with({{1, 2}, {1, 1}}) == Pair(0, 3));
  CHECK(with({{2, 4}, {1, 1}}) == Pair(1, 3));
  CHECK(with({{0, 3}, {2, 2}}) == Pair(2, 3));
  CHECK(find_overlap({{{}, {}}, {{}, {}}}) == Pair(0, 1));

  std::mt19937_64 random(5);
  int found = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<ShardSlice> slices;
    for (int i = 0; i < 4; ++i) {
      const auto pick = [&](int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); };
      slices.push_back({.offsets = {pick(6), pick(6), pick(2)}, .sizes = {pick(3), 1 + pick(3), 1 + pick(2)}});
    }
    bool any = false;
    for (size_t i = 0; i < slices.size(); ++i) {
      for (size_t j = i + 1; j < slices.size(); ++j) {
        any = any || intersection(slices[i], slices[j]).numel() > 0;
      }
    }
    const auto overlap = find_overlap(slices);
    REQUIRE(overlap.has_value() == any);
    if (overlap) {
      REQUIRE(intersection(slices[overlap->first], slices[overlap->second]).numel() > 0);
      ++found;
    }
  }
  CHECK(found > 200);
  CHECK(found < 1800);
}

}  // namespace tessera::dcp
