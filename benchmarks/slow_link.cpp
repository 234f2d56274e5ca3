// Cost of collectives between hosts over a slow network, with gloo and with the hierarchical backend. This is a rank of
// slow_link.sh, which makes the hosts.
//
// Sizes are bytes of a rank's input for all_gather, and of the whole tensor for reduce_scatter and all_reduce; float32.
// "sent" is the number of bytes that rank 0's host sent, as counted by its network interface, divided by the formula's
// number for the payload: the hierarchical backend's data crosses once per host, gloo's once per rank. "time" is
// divided by that of the formula's bytes at the rate of the link.

#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {
namespace {

constexpr int64_t kBytes = 4 << 20;
constexpr int kCalls = 3;

/// Returns the number of bytes that this host's eth0 has sent.
double sent_bytes() {
  std::ifstream devices("/proc/net/dev");
  for (std::string line; std::getline(devices, line);) {
    if (const auto name = line.find("eth0:"); name != std::string::npos) {
      std::istringstream fields(line.substr(name + 5));
      double value = 0;
      for (int field = 0; field < 9; ++field) {
        fields >> value;
      }
      return value;
    }
  }
  throw std::runtime_error("there is no eth0");
}

struct Case {
  std::string name;
  std::function<void()> call;
  double formula = 0;  // bytes that a host sends
};

void measure(const std::string& backend, double bytes_per_second) {
  init_process_group({.backend = backend == "gloo" ? backend : ""});
  const ProcessGroupPtr& group = default_group();
  const int64_t ranks = get_world_size(), hosts = 2, local = ranks / hosts, count = kBytes / 4;
  const at::Tensor whole = at::zeros({count}), part = at::zeros({count / ranks}), all = at::zeros({ranks * count});
  const bool once = get_backend(group) == "hierarchical";
  // Each of the host's ranks sends its part to all ranks of the other host, or to one of them.
  const auto copies = static_cast<double>(once ? 1 : local);
  const auto tensor = static_cast<double>(kBytes), of_host = tensor * static_cast<double>(local);
  const Case cases[] = {
      {"all_gather", [&] { all_gather(all, whole, group); }, of_host * copies},
      {"reduce_scatter", [&] { reduce_scatter(part, whole, ReduceOp::Sum, group); }, tensor / hosts * copies},
      {"all_reduce", [&] { all_reduce(whole, ReduceOp::Sum, group); }, 2 * tensor / hosts * copies},
  };
  for (const auto& [name, call, formula] : cases) {
    call();
    barrier(group);
    const double sent_before = sent_bytes();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      call();
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    barrier(group);  // what is still queued at the interface comes before it
    const double sent = (sent_bytes() - sent_before) / kCalls, seconds = elapsed.count() / kCalls;
    if (get_rank() == 0) {
      fmt::print("{:14} {:12}  {:8.1f} ms   sent / formula {:.3f}   time / (formula / rate) {:.3f}\n", name,
                 get_backend(group), 1e3 * seconds, sent / formula, seconds / (formula / bytes_per_second));
    }
    barrier(group);
  }
  destroy_process_group();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  try {
    tessera::measure(argc > 1 ? argv[1] : "", argc > 2 ? std::atof(argv[2]) : 12.5e6);
  } catch (const std::exception& error) {
    fmt::print(stderr, "slow_link: {}\n", error.what());
    return 1;
  }
}
