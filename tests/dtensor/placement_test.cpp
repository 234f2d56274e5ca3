#include "dtensor/spec/placement.h"

#include "base/error.h"
#include "dtensor/spec/shard_math.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("placements are values that print as they are written", "[dtensor]") {
  CHECK((Shard(1) == Shard(1)));
  CHECK((Shard(1) != Shard(0)));
  CHECK((Placement(Replicate()) != Placement(Partial())));
  CHECK((Partial() == Partial(ReduceOp::Sum)));
  CHECK((Partial() != Partial(ReduceOp::Avg)));
  CHECK((NormPartial(2) != NormPartial(3)));
  CHECK((Placement(NormPartial(1)) != Placement(Partial())));

  CHECK(fmt::format("{}", Shard(1)) == "Shard(1)");
  CHECK(fmt::format("{}", Replicate()) == "Replicate()");
  CHECK(fmt::format("{}", Partial(ReduceOp::Max)) == "Partial(Max)");
  CHECK(to_string(Placements{Shard(0), NormPartial(2.5)}) == "(Shard(0), NormPartial(2.5))");

  CHECK((Placement(Shard(1)).hash() == Placement(Shard(1)).hash()));
  CHECK((Placement(Shard(1)).hash() != Placement(Shard(2)).hash()));
  CHECK((Placement(Partial()).hash() != Placement(Replicate()).hash()));
}

TEST_CASE("placements answer what they are", "[dtensor]") {
  CHECK(Shard(2).is_shard());
  CHECK(Shard(2).is_shard(2));
  CHECK_FALSE(Shard(2).is_shard(1));
  CHECK((Shard(2).dim() == 2));
  CHECK(NormPartial(2).is_partial());
  CHECK_FALSE(NormPartial(2).is_partial(ReduceOp::Sum));
  CHECK((NormPartial(2).norm_type() == 2));
  CHECK((Partial(ReduceOp::Min).reduce_op() == ReduceOp::Min));
  CHECK_FALSE(Replicate().is_partial());
}

TEST_CASE("normalized counts dims from the front and refuses what does not fit", "[dtensor]") {
  CHECK(to_string(normalized({Shard(-1), Replicate()}, 3, 2, "here")) == to_string(Placements{Shard(2), Replicate()}));
  CHECK(to_string(normalized({Shard(-3)}, 3, 1, "here")) == to_string(Placements{Shard(0)}));
  CHECK_THROWS_WITH(normalized({Shard(0)}, 3, 2, "here"),
                    "here: 1 placements (Shard(0)) for a mesh of 2 axes; give one placement an axis");
  CHECK_THROWS_WITH(normalized({Shard(3)}, 3, 1, "here"),
                    "here: Shard(3) on a tensor of 3 dims; dim must be in [-3, 2]");
  CHECK_THROWS_AS(normalized({Shard(-4)}, 3, 1, "here"), ValueError);
  CHECK_THROWS_WITH(normalized({Shard(0)}, 0, 1, "here"), Catch::Contains("use Replicate() for a scalar"));
}

TEST_CASE("orders say which axis cuts a dim first, and equal layouts are equal", "[dtensor]") {
  const auto text = [](Placements placements, int64_t axes) {
    return to_string(normalized(placements, 3, axes, "here"));
  };
  CHECK(fmt::format("{}", Shard(0, 1)) == "Shard(0, 1)");
  CHECK((Shard(0, 1) != Shard(0)));
  CHECK((Shard(0, 1).without_order() == Shard(0)));
  CHECK((Placement(Shard(0, 1)).hash() != Placement(Shard(0)).hash()));

  CHECK(text({Shard(0, 5), Shard(0)}, 2) == "(Shard(0, 1), Shard(0))");
  CHECK(text({Shard(0, 5), Shard(0, 7)}, 2) == "(Shard(0), Shard(0))");
  CHECK(text({Shard(0, 5), Shard(1)}, 2) == "(Shard(0), Shard(1))");
  CHECK(text({Shard(1), Shard(0, 2), Shard(0, 1)}, 3) == "(Shard(1), Shard(0, 1), Shard(0))");
  CHECK(text({Shard(0, 1), Shard(0, 2), Shard(0)}, 3) == "(Shard(0, 1), Shard(0, 2), Shard(0))");
  CHECK_THROWS_WITH(normalized({Shard(0, -1)}, 1, 1, "here"), "here: Shard(0, -1); an order is at least 0");

  // 7 rows, axis 1 cuts first: [0, 4) and [4, 7), each then cut by axis 0.
  const std::vector<int64_t> axes{2, 2};
  const std::vector<DimRange> expected{{0, 2}, {4, 2}, {2, 2}, {6, 1}};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const std::vector<int64_t> coordinate{rank / 2, rank % 2};
    CHECK(local_range(7, 0, {Shard(0, 1), Shard(0)}, {.axis_sizes = axes, .coordinate = coordinate}) ==
          expected[static_cast<size_t>(rank)]);
  }
}

TEST_CASE("pending reductions of several axes must commute", "[dtensor]") {
  CHECK(to_string(normalized({Partial(), Partial(ReduceOp::Avg)}, 1, 2, "here")) == "(Partial(Sum), Partial(Avg))");
  CHECK_THROWS_WITH(normalized({Partial(), Partial(ReduceOp::Max)}, 1, 2, "here"),
                    Catch::Contains("depend on which axis is reduced first"));
}

TEST_CASE("chunk_range cuts as torch.chunk does", "[dtensor]") {
  const auto cut = [](int64_t size, int64_t ranks) {
    std::vector<std::pair<int64_t, int64_t>> pieces;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto range = chunk_range(size, ranks, rank);
      pieces.emplace_back(range.offset, range.length);
    }
    return pieces;
  };
  using Pieces = std::vector<std::pair<int64_t, int64_t>>;
  CHECK(cut(8, 4) == Pieces{{0, 2}, {2, 2}, {4, 2}, {6, 2}});
  CHECK(cut(5, 4) == Pieces{{0, 2}, {2, 2}, {4, 1}, {5, 0}});
  CHECK(cut(2, 3) == Pieces{{0, 1}, {1, 1}, {2, 0}});
  CHECK(cut(0, 2) == Pieces{{0, 0}, {0, 0}});
  CHECK(cut(7, 1) == Pieces{{0, 7}});
}

TEST_CASE("two axes that shard one dim cut one inside the other", "[dtensor]") {
  // 7 rows over 2, then each part over 2: [0, 4) → [0, 2), [2, 4) and [4, 7) → [4, 6), [6, 7).
  const std::vector<int64_t> axes{2, 2};
  const std::vector<DimRange> expected{{0, 2}, {2, 2}, {4, 2}, {6, 1}};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const std::vector<int64_t> coordinate{rank / 2, rank % 2};
    const MeshPosition position{.axis_sizes = axes, .coordinate = coordinate};
    const auto& range = expected[static_cast<size_t>(rank)];
    CHECK(local_range(7, 1, {Shard(1), Shard(1)}, position) == range);
    const auto sizes = local_sizes({3, 7}, {Shard(1), Shard(1)}, position);
    CHECK(std::vector<int64_t>(sizes.begin(), sizes.end()) == std::vector<int64_t>{3, range.length});
  }
}

TEST_CASE("local ranges tile the dim on every mesh", "[dtensor]") {
  for (int64_t size = 0; size < 12; ++size) {
    for (int64_t outer = 1; outer < 5; ++outer) {
      for (int64_t inner = 1; inner < 4; ++inner) {
        const std::vector<int64_t> axes{outer, inner};
        int64_t next = 0;
        for (int64_t rank = 0; rank < outer * inner; ++rank) {
          const std::vector<int64_t> coordinate{rank / inner, rank % inner};
          const auto range = local_range(size, 0, {Shard(0), Shard(0)}, {.axis_sizes = axes, .coordinate = coordinate});
          CHECK((range.length == 0 || range.offset == next));
          next += range.length;
        }
        CHECK(next == size);
      }
    }
  }
}

}  // namespace tessera
