// What engine_cost_test runs under callgrind: forward and backward of the tiny model of benchmarks/train_model.h, plain
// and under fully_shard over 2 ranks of the fake backend, which moves no data.

#include "benchmarks/train_model.h"
#include "comm/process_group.h"
#include "testing/callgrind.h"

int main() {
  using namespace tessera;
  init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const TrainModel plain = make_train_model("tiny"), sharded = make_train_model("tiny");
  shard(sharded);
  testing::count_instructions("plain", 10, make_step(plain, Optimizer::None));
  testing::count_instructions("sharded", 10, make_step(sharded, Optimizer::None));
  destroy_process_group();
  return 0;
}
