// Cost of an op on a DTensor: `./bazelw run //benchmarks:dtensor_dispatch`.
//
//   add, ...         the ops of dispatch_ops.h on DTensors
//   plain/add        the same op on plain tensors
//   add_over_plain   add / plain/add
//
// If PEER_PYTHON names a Python with torch, dtensor_dispatch_peer.py measures PyTorch's DTensor.

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <string>

#include "benchmarks/dispatch_ops.h"
#include "benchmarks/measure.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

constexpr int kCalls = 2000;  // a round, as in the peer

void run(const BenchmarkOptions& options) {
  init_process_group({.rank = 0, .world_size = 1});
  const auto plain = plain_operands();
  const auto dtensors = dtensor_operands();
  const c10::NoGradGuard no_grad;
  Results us;
  for (const auto& op : dispatch_ops()) {
    const auto measure = [&](const DispatchOperands& operands) {
      return microseconds({[&] { op.run(operands); }}, wall_us, options.rounds, kCalls)[0];
    };
    us[op.name] = measure(dtensors);
    if (!op.dtensor_only) {
      us[std::string("plain/") + op.name] = measure(plain);
    }
  }
  destroy_process_group();
  const auto peer = run_peer("benchmarks/peers/dtensor_dispatch_peer.py", fmt::format("--rounds {}", options.rounds));
  for (const auto& [name, value] : us) {
    print_result(name, value, "us", peer, options.json);
  }
  print_result("add_over_plain", us.at("add") / us.at("plain/add"), "x", peer, options.json);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(argc, argv,
                                 {.name = "dtensor_dispatch",
                                  .description = "What an op on a DTensor costs, beside the same on plain tensors.",
                                  .rounds = 5,
                                  .run = tessera::run});
}
