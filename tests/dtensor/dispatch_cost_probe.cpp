// What dispatch_cost_test runs under callgrind: each op of benchmarks/dispatch_ops.h, as "<name>/dtensor" and
// "<name>/plain".

#include <ATen/core/grad_mode.h>

#include "benchmarks/dispatch_ops.h"
#include "comm/process_group.h"
#include "testing/callgrind.h"

int main() {
  using namespace tessera;
  const at::NoGradGuard no_grad;
  init_process_group({.rank = 0, .world_size = 1});
  const auto plain = plain_operands();
  const auto dtensors = dtensor_operands();
  for (const auto& op : dispatch_ops()) {
    const std::string name = op.name;
    testing::count_instructions(name + "/dtensor", 100, [&] { op.run(dtensors); });
    if (!op.dtensor_only) {
      testing::count_instructions(name + "/plain", 100, [&] { op.run(plain); });
    }
  }
  destroy_process_group();
  return 0;
}
