#include "tests/comm/cases/own_gloo.h"

#include <algorithm>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/process_group.h"

namespace tessera::testing {

c10::intrusive_ptr<c10d::Backend> connect_own_gloo(const std::string& name, const std::vector<int64_t>& ranks,
                                                   int num_devices) {
  c10d::TCPStoreOptions tcp;  // rank 0 of run_processes() serves it
  tcp.port = static_cast<uint16_t>(std::atoi(std::getenv("MASTER_PORT")));
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
  const int size = static_cast<int>(ranks.size());
  const int rank = static_cast<int>(std::ranges::find(ranks, get_rank()) - ranks.begin());
  auto options = c10d::ProcessGroupGloo::Options::create();
  for (int device = 0; device < num_devices; ++device) {
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  }
  return c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, size,
                                                     std::move(options));
}

}  // namespace tessera::testing
