#include "comm/backend_choice.h"

#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/error.h"

namespace tessera {

std::string backend_from_environment() {
  constexpr const char* kVariable = "TESSERA_CPU_BACKEND";
  const char* const value = std::getenv(kVariable);
  std::string wish = value == nullptr ? "" : value;
  TESSERA_CHECK(ValueError, wish.empty() || wish == "gloo" || wish == "shm",
                "init_process_group: {}=\"{}\"; allowed are \"gloo\" and \"shm\"", kVariable, wish);
  return wish;
}

std::vector<HostProcess> find_processes(const ProcessGroupOptions& options, const std::string& key) {
  const bool are_processes = options.backend.empty() || options.backend == "shm" || options.backend == "gloo";
  if (options.world_size == 1 || !are_processes) {
    return {};
  }
  std::vector<HostProcess> processes;
  try {
    processes = exchange_processes(*c10::make_intrusive<c10d::PrefixStore>(key, *options.store.get()), options.rank,
                                   options.world_size);
  } catch (const std::exception& failure) {
    throw CommError(fmt::format("init_process_group: rank {} of {} could not learn where the other ranks run: {}",
                                options.rank, options.world_size, failure.what()));
  }
  for (int rank = 0; rank < options.world_size; ++rank) {
    TESSERA_CHECK(
        ValueError, options.backend != "shm" || share_host(processes, {0, rank}),
        "init_process_group: backend \"shm\", but ranks 0 and {} do not share a host (boot, pid namespace and "
        "user: \"{}\" and \"{}\"); use \"gloo\"",
        rank, processes[0].host, processes[rank].host);
  }
  return processes;
}

std::optional<HostLayout> hierarchical_layout(const std::vector<HostProcess>& processes,
                                              const std::vector<int64_t>& ranks) {
  std::vector<std::string> hosts;
  hosts.reserve(ranks.size());
  for (const int64_t rank : ranks) {
    hosts.push_back(processes.empty() ? "" : processes.at(static_cast<size_t>(rank)).host);
  }
  return find_host_layout(hosts);
}

std::string backend_for_group(const ProcessGroupOptions& options, const std::vector<HostProcess>& processes,
                              const std::vector<int64_t>& ranks) {
  if (!options.backend.empty()) {
    return options.backend;
  }
  if (share_host(processes, ranks)) {
    return "shm";
  }
  return hierarchical_layout(processes, ranks) ? "hierarchical" : "gloo";
}

}  // namespace tessera
