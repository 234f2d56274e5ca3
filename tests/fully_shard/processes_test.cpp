// The same oracle with ranks that are processes: reductions run in the order of the ranks there too.

#include "testing/run_processes.h"
#include "tests/fully_shard/train_and_compare.h"
#include "third_party/catch2/catch.h"

using namespace tessera;
using namespace tessera::testing;

TEST_CASE("fully_shard over gloo equals one process bit for bit, 2 processes") {
  run_processes(2, [](int rank) { train_and_compare(rank, 2, OptimizerBuilt::BeforeSharding, {}); });
}

TEST_CASE("fully_shard over gloo equals one process bit for bit, 3 processes") {
  run_processes(3, [](int rank) { train_and_compare(rank, 3, OptimizerBuilt::AfterSharding, {}); });
}

TEST_CASE("fully_shard over shm equals one process bit for bit, 3 processes") {
  run_processes(3, [](int rank) { train_and_compare(rank, 3, OptimizerBuilt::BeforeSharding, {}); },
                {.backend = "shm"});
}
