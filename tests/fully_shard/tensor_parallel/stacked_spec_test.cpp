#include "fully_shard/layout/stacked_spec.h"

#include "dtensor/spec/shard_math.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("tensor parallelism cuts before data parallelism, in the fewest orders that say so", "[fully_shard]") {
  const auto stacked = [](const Placements& dp, const Placements& tp) { return to_string(stacked_placements(dp, tp)); };
  CHECK(stacked({Shard(0)}, {Shard(0)}) == "(Shard(0, 1), Shard(0))");
  CHECK(stacked({Shard(0)}, {Shard(1)}) == "(Shard(0), Shard(1))");
  CHECK(stacked({Shard(0)}, {Replicate()}) == "(Shard(0), Replicate())");
  CHECK(stacked({Replicate()}, {Shard(0)}) == "(Replicate(), Shard(0))");
  CHECK(stacked({Replicate(), Shard(1)}, {Shard(1)}) == "(Replicate(), Shard(1, 1), Shard(1))");
  CHECK(stacked({Shard(0)}, {Shard(0), Shard(1)}) == "(Shard(0, 1), Shard(0), Shard(1))");
  CHECK(stacked({Shard(0)}, {Shard(0), Shard(0)}) == "(Shard(0, 2), Shard(0), Shard(0, 1))");
  CHECK(stacked({Shard(0)}, {Shard(0, 1), Shard(0)}) == "(Shard(0, 2), Shard(0, 1), Shard(0))");
}

TEST_CASE("a rank's part of a stacked dim is its chunk of its chunk, uneven and empty ones too", "[fully_shard]") {
  const std::vector<int64_t> axis_sizes = {3, 2};  // dp, tp
  for (const int64_t rows : {0, 1, 2, 3, 5, 16, 17}) {
    for (int64_t dp = 0; dp < 3; ++dp) {
      for (int64_t tp = 0; tp < 2; ++tp) {
        const std::vector<int64_t> coordinate = {dp, tp};
        const auto part = local_range(rows, 0, stacked_placements({Shard(0)}, {Shard(0)}), {axis_sizes, coordinate});
        const auto of_tp = chunk_range(rows, 2, tp);
        const auto of_dp = chunk_range(of_tp.length, 3, dp);
        CAPTURE(rows, dp, tp);
        CHECK(part == DimRange{of_tp.offset + of_dp.offset, of_dp.length});
      }
    }
  }
}

TEST_CASE("the stacked mesh has the data-parallel axes first", "[fully_shard]") {
  run_ranks(8, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2, 2}, {"tp", "replicate", "dp"});
    const auto dp = mesh[{"replicate", "dp"}];
    const auto tp = mesh["tp"];
    expect_equal(why_not_stacked(dp, tp), "");
    const auto stacked = stacked_mesh(dp, tp);
    expect_equal(stacked.to_string(), "DeviceMesh(cpu, {replicate: 2, dp: 2, tp: 2})");
    TESSERA_EXPECT((stacked[{"replicate", "dp"}] == dp));
    TESSERA_EXPECT(stacked["tp"] == tp);
    TESSERA_EXPECT(stacked.root() == mesh);
    const auto flat = mesh.flatten({"replicate", "dp"}, "data");
    expect_equal(stacked_mesh(flat, tp).to_string(), "DeviceMesh(cpu, {data: 4, tp: 2})");
  });
}

TEST_CASE("meshes that cannot be stacked", "[fully_shard]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    expect_equal(why_not_stacked(mesh["dp"], mesh),
                 "DeviceMesh(cpu, {dp: 2}) and DeviceMesh(cpu, {dp: 2, tp: 2}) overlap; each axis of DeviceMesh(cpu, "
                 "{dp: 2, tp: 2}) either shards by tensor parallelism or carries data");
    const auto flat = mesh.flatten({"dp", "tp"}, "all");
    TESSERA_EXPECT(why_not_stacked(flat, mesh["tp"]).find("overlap") != std::string::npos);
    const auto other = init_device_mesh(at::kCPU, {4}, {"data"});
    expect_equal(why_not_stacked(other, mesh["tp"]),
                 "DeviceMesh(cpu, {data: 4}) and DeviceMesh(cpu, {tp: 2}) are not parts of one mesh (their roots are "
                 "DeviceMesh(cpu, {data: 4}) and DeviceMesh(cpu, {dp: 2, tp: 2})); take both from one, as mesh[\"dp\"] "
                 "and mesh[\"tp\"]");
  });
}

}  // namespace tessera
