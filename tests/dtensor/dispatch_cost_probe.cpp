// What dispatch_cost_test runs under callgrind: kCalls calls of each op of benchmarks/dispatch_ops.h, dumped under the
// name "<name>/dtensor" or "<name>/plain".

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <valgrind/callgrind.h>

#include <string>

#include "benchmarks/dispatch_ops.h"
#include "comm/process_group.h"

namespace {

constexpr int kCalls = 100;

void count(const tessera::DispatchOp& op, const tessera::DispatchOperands& operands, const char* kind) {
  for (int i = 0; i < 5; ++i) {
    op.run(operands);
  }
  const std::string name = fmt::format("{}/{}", op.name, kind);
  CALLGRIND_TOGGLE_COLLECT;
  for (int i = 0; i < kCalls; ++i) {
    op.run(operands);
  }
  CALLGRIND_TOGGLE_COLLECT;
  CALLGRIND_DUMP_STATS_AT(name.c_str());
}

}  // namespace

int main() {
  const at::NoGradGuard no_grad;
  tessera::init_process_group({.rank = 0, .world_size = 1});
  const auto plain = tessera::plain_operands();
  const auto dtensors = tessera::dtensor_operands();
  for (const auto& op : tessera::dispatch_ops()) {
    count(op, dtensors, "dtensor");
    if (!op.dtensor_only) {
      count(op, plain, "plain");
    }
  }
  tessera::destroy_process_group();
  return 0;
}
