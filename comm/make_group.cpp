#include "comm/make_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "comm/backend_choice.h"
#include "comm/backend_spec.h"
#include "comm/fake/fake_backend.h"
#include "comm/gloo/gloo_backend.h"
#include "comm/hierarchical_backend.h"
#include "comm/nccl/nccl_backend.h"
#include "comm/shm/shm_backend.h"
#include "comm/threads/thread_backend.h"

namespace tessera {

namespace {

using Backend = c10::intrusive_ptr<GroupBackend>;

/// Returns the group's processes, if they are known.
std::vector<HostProcess> member_processes(const GroupSource& source, const GroupInfo& info) {
  std::vector<HostProcess> members;
  for (size_t place = 0; place < info.ranks.size() && !source.processes.empty(); ++place) {
    members.push_back(source.processes.at(static_cast<size_t>(info.ranks[place])));
  }
  return members;
}

Backend make_gloo(const GroupSource& source, GroupInfo info, c10::intrusive_ptr<c10d::Store> store) {
  std::vector<HostProcess> members = member_processes(source, info);
  return make_gloo_backend({.info = std::move(info),
                            .store = std::move(store),
                            .processes = std::move(members),
                            .master_addr = source.options.master_addr});
}

Backend make_shm(const GroupSource& source, GroupInfo info, c10::intrusive_ptr<c10d::Store> store) {
  const std::vector<HostProcess> members = member_processes(source, info);
  const std::string& host = members[0].host;
  const auto host_ranks = std::ranges::count(source.processes, host, &HostProcess::host);
  return make_shm_backend({.info = std::move(info),
                           .store = std::move(store),
                           .processes = members,
                           .host_ranks = static_cast<int>(host_ranks)});
}

/// Returns the info of the group's ranks at `places`.
GroupInfo make_subgroup_info(const GroupInfo& info, const std::vector<int>& places, const char* which) {
  GroupInfo part{.name = fmt::format("{}, {}", info.name, which), .timeout = info.timeout};
  for (const int place : places) {
    part.rank = place == info.rank ? static_cast<int>(part.ranks.size()) : part.rank;
    part.ranks.push_back(info.ranks[static_cast<size_t>(place)]);
  }
  return part;
}

Backend make_hierarchical(const GroupSource& source, GroupInfo info, const std::string& key) {
  const HostLayout layout = *hierarchical_layout(source.processes, info.ranks);
  const auto store = *source.options.store.get();
  const auto prefixed = [=](const std::string& suffix) {
    return c10::make_intrusive<c10d::PrefixStore>(key + suffix, store);
  };
  auto host = make_shm(source, make_subgroup_info(info, layout.ranks_on_host(info.rank), "this host"),
                       prefixed(fmt::format("/host{}", layout.host_index(info.rank))));
  auto across = make_gloo(source, make_subgroup_info(info, layout.ranks_across_hosts(info.rank), "across hosts"),
                          prefixed(fmt::format("/across{}", layout.local_rank(info.rank))));
  // Runs on the group's thread at first use, with a separate connection: while one group's thread waits for a key,
  // others cannot use that connection to set theirs.
  const auto make_flat = [=, members = member_processes(source, info), address = source.options.master_addr] {
    const auto own = store->clone();
    own->setTimeout(store->getTimeout());
    return make_gloo_backend({.info = info,
                              .store = c10::make_intrusive<c10d::PrefixStore>(key + "/flat", own),
                              .processes = members,
                              .master_addr = address});
  };
  return make_hierarchical_backend(
      {.info = info, .layout = layout, .host = std::move(host), .across = std::move(across), .make_flat = make_flat});
}

/// Makes the backend for one rank, which needs no peer, whichever backend larger groups use.
Backend make_one_rank_backend(GroupInfo info) {
  auto thread_group = std::make_shared<ThreadGroup>(std::make_shared<ThreadWorld>(1), std::vector<int64_t>{0});
  return c10::make_intrusive<ThreadBackend>(std::move(info), std::move(thread_group));
}

Backend make_cpu_backend(const std::string& backend, const GroupSource& source, GroupInfo info,
                         const std::string& key) {
  const ProcessGroupOptions& options = source.options;
  if (backend == "fake") {
    return c10::make_intrusive<FakeBackend>(std::move(info));
  }
  if (info.size() == 1) {
    return make_one_rank_backend(std::move(info));
  }
  if (backend == "threads") {
    auto thread_group = options.thread_world->join(key, info.ranks);
    return c10::make_intrusive<ThreadBackend>(std::move(info), std::move(thread_group));
  }
  if (backend == "hierarchical") {
    return make_hierarchical(source, std::move(info), key);
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>(key, *options.store.get());
  if (backend == "shm") {
    return make_shm(source, std::move(info), std::move(store));
  }
  return make_gloo(source, std::move(info), std::move(store));
}

Backend make_cuda_backend(const GroupSource& source, GroupInfo info, const std::string& key) {
  if (info.size() == 1) {
    return make_one_rank_backend(std::move(info));
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>(key + "/nccl", *source.options.store.get());
  return make_nccl_backend(
      {.info = std::move(info), .store = std::move(store), .device = source.cuda.device, .nccl = source.cuda.options});
}

}  // namespace

ProcessGroupPtr make_group(const GroupSource& source, GroupInfo info, const std::string& key) {
  using Type = c10d::ProcessGroup::BackendType;
  const std::string name = backend_for_group(source.options, source.processes, info.ranks);
  const bool has_cpu = name != BackendSpec::kNone;
  info.key = key;
  const Type cpu_type = name == "gloo" ? Type::GLOO : Type::CUSTOM;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(info.rank, info.size());
  if (source.cuda.backend == "nccl") {
    group->setBackend(c10::DeviceType::CUDA, Type::NCCL, make_cuda_backend(source, info, key));
  }
  if (has_cpu) {
    auto backend = make_cpu_backend(name, source, std::move(info), key);
    group->setBackend(c10::DeviceType::CPU, cpu_type, backend);
    if (name == source.cuda.backend) {
      group->setBackend(c10::DeviceType::CUDA, cpu_type, backend);
    }
  }
  group->setDefaultBackend(has_cpu ? cpu_type : Type::NCCL);
  group->setGroupName(key);
  return group;
}

}  // namespace tessera
