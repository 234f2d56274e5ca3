// The common models on ranks that are processes, and how such a test ends where its backend is missing.

#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/fsdp_models/transformer_with_shared_params.h"
#include "testing/run_processes.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("rows 39, 40, 49: sharded models train as their references on ranks that are processes") {
  for (const int world_size : {2, 4}) {
    run_processes(world_size, [&](int) {
      expect_equal(get_world_size(), world_size);
      const auto mesh = init_device_mesh(at::kCPU, {world_size}, {"dp"});
      test_fsdp_parity(transformer_with_shared_params(), {.mesh = mesh});
      test_fsdp_parity(nested_wrapped_model(), {.mesh = mesh});
    });
  }
}

TEST_CASE("row 41: a backend that this build lacks is a skip, not a failure; a failure is none") {
  const RunProcessesOptions missing{.backend = "nccl"};
  const auto result = try_run_processes(
      2, [](int) { throw Error("must not run"); }, missing);
  CHECK(result.skipped);
  CHECK(result.exit_code == kSkippedExitCode);
  CHECK_NOTHROW(run_processes(
      2, [](int) {}, missing));
  const auto failed = try_run_processes(2, [](int rank) { TESSERA_CHECK(Error, rank != 1, "a fault"); });
  CHECK(!failed.skipped);
  CHECK(failed.exit_code == 1);
}

TEST_CASE("row 41: ranks without peers") {
  run_processes(2, [](int) { expect_equal(get_world_size(), 2); }, {.backend = "fake"});
}

}  // namespace tessera::testing
