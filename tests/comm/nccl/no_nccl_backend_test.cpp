// A build without --config=cuda refuses NCCL, on every rank.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "comm/nccl/nccl_options.h"
#include "comm/process_group.h"
#include "testing/run_processes.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

TEST_CASE("nccl is refused with the option that builds it") {
  const RankContextGuard guard{RankContext::create()};
  for (const char* backend : {"nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"}) {
    const ProcessGroupOptions options{.backend = backend, .rank = 0, .world_size = 2};
    CHECK_THROWS_AS(init_process_group(options), NotImplementedError);
    CHECK_THROWS_WITH(init_process_group(options), ContainsSubstring("\"nccl\" is not part of this build") &&
                                                       ContainsSubstring("build with --config=cuda") &&
                                                       ContainsSubstring("\"shm\", \"gloo\", \"threads\", \"fake\""));
    CHECK_THROWS_AS(init_process_group(options, {.high_priority_stream = true}), NotImplementedError);
  }
  CHECK_FALSE(is_initialized());
  CHECK_THROWS_AS(nccl_flight_record(), NotImplementedError);
}

TEST_CASE("options of NCCL change nothing for a group without it") {
  const RankContextGuard guard{RankContext::create()};
  init_process_group({.backend = "cpu:gloo", .rank = 0, .world_size = 1}, {.device = 7});
  CHECK(get_world_size(new_group({0}, "alone", {.high_priority_stream = true})) == 1);
  destroy_process_group();
}

}  // namespace
}  // namespace tessera
