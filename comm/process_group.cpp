#include "comm/process_group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/error.h"
#include "comm/backend_choice.h"
#include "comm/fake_backend.h"
#include "comm/gloo_backend.h"
#include "comm/group_backend.h"
#include "comm/rank_environment.h"
#include "comm/rank_state.h"
#include "comm/shm_backend.h"
#include "comm/store.h"
#include "comm/thread_backend.h"

namespace tessera {

namespace {

constexpr const char* kBuiltIn = "\"shm\", \"gloo\", \"threads\", \"fake\", or \"\" to choose";

void resolve_ranks(ProcessGroupOptions& options) {
  TESSERA_CHECK(ValueError, (options.rank == -1) == (options.world_size == -1),
                "init_process_group: rank {} and world_size {}; give both, or neither to read the environment",
                options.rank, options.world_size);
  if (options.rank == -1) {
    const RankEnvironment environment = rank_environment();
    options.rank = environment.rank;
    options.world_size = environment.world_size;
    if (options.master_addr.empty()) {
      options.master_addr = environment.master_addr;
    }
    if (options.master_port == 0) {
      options.master_port = environment.master_port;
    }
  }
  TESSERA_CHECK(ValueError, options.world_size >= 1 && options.rank >= 0 && options.rank < options.world_size,
                "init_process_group: rank {} of {} ranks; ranks are 0 to world_size - 1", options.rank,
                options.world_size);
}

// Leaves "" where each group chooses between shm and gloo.
void resolve_backend(ProcessGroupOptions& options) {
  std::string& backend = options.backend;
  if (backend.empty()) {
    const std::string wish = backend_from_environment();
    backend = options.thread_world || options.world_size == 1 ? "threads" : wish;
  }
  TESSERA_CHECK(NotImplementedError, backend != "nccl",
                "init_process_group: backend \"{}\" is not part of this build; allowed are {}", backend, kBuiltIn);
  TESSERA_CHECK(ValueError,
                backend.empty() || backend == "shm" || backend == "gloo" || backend == "threads" || backend == "fake",
                "init_process_group: backend \"{}\" is unknown; allowed are {}", backend, kBuiltIn);
  if (backend == "threads" && !options.thread_world && options.world_size == 1) {
    options.thread_world = std::make_shared<ThreadWorld>(1);
  }
  TESSERA_CHECK(ValueError, backend != "threads" || options.thread_world,
                "init_process_group: backend \"threads\" with {} ranks needs ProcessGroupOptions::thread_world, which "
                "the ranks of this process share; for ranks as processes use \"shm\" or \"gloo\"",
                options.world_size);
  TESSERA_CHECK(ValueError, backend != "threads" || options.thread_world->size() == options.world_size,
                "init_process_group: world_size {}, but the thread_world has {} ranks", options.world_size,
                options.thread_world->size());
}

void resolve_store(ProcessGroupOptions& options) {
  if (options.backend == "threads" || options.backend == "fake" || options.store.get() != nullptr) {
    return;
  }
  if (options.world_size == 1) {
    options.store = local_store();
    return;
  }
  if (options.master_addr.empty() && options.master_port == 0) {
    const RankEnvironment environment = rank_environment();
    options.master_addr = environment.master_addr;
    options.master_port = environment.master_port;
  }
  TESSERA_CHECK(ValueError, !options.master_addr.empty() && options.master_port >= 1 && options.master_port <= 65535,
                "init_process_group: master_addr \"{}\" and master_port {}; {} ranks need the address of rank 0's host "
                "and a port, from 1 to 65535, there (MASTER_ADDR, MASTER_PORT)",
                options.master_addr, options.master_port, options.world_size);
  options.store = connect_store({.address = options.master_addr,
                                 .port = options.master_port,
                                 .rank = options.rank,
                                 .world_size = options.world_size,
                                 .timeout = options.timeout});
}

/// What groups are made from.
struct GroupSource {
  const ProcessGroupOptions& options;
  const std::vector<HostProcess>& processes;
};

c10::intrusive_ptr<GroupBackend> make_shm(const GroupSource& source, GroupInfo info,
                                          c10::intrusive_ptr<c10d::Store> store) {
  std::vector<HostProcess> members;
  for (const int64_t rank : info.ranks) {
    members.push_back(source.processes.at(rank));
  }
  const std::string& host = members[0].host;
  const auto host_ranks = std::ranges::count(source.processes, host, &HostProcess::host);
  return make_shm_backend({.info = std::move(info),
                           .store = std::move(store),
                           .processes = members,
                           .host_ranks = static_cast<int>(host_ranks)});
}

c10::intrusive_ptr<GroupBackend> make_backend(const std::string& backend, const GroupSource& source, GroupInfo info,
                                              const std::string& key) {
  const ProcessGroupOptions& options = source.options;
  if (backend == "fake") {
    return c10::make_intrusive<FakeBackend>(std::move(info));
  }
  if (backend == "threads") {
    auto meeting_place = options.thread_world->join(key, info.ranks);
    return c10::make_intrusive<ThreadBackend>(std::move(info), std::move(meeting_place));
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>(key, *options.store.get());
  if (backend == "shm") {
    return make_shm(source, std::move(info), std::move(store));
  }
  return make_gloo_backend({.info = std::move(info), .store = std::move(store), .master_addr = options.master_addr});
}

// One rank needs no peer, whichever backend the others use.
c10::intrusive_ptr<GroupBackend> make_one_rank_backend(GroupInfo info) {
  auto meeting_place = std::make_shared<ThreadGroup>(std::make_shared<ThreadWorld>(1), std::vector<int64_t>{0});
  return c10::make_intrusive<ThreadBackend>(std::move(info), std::move(meeting_place));
}

ProcessGroupPtr make_group(const GroupSource& source, GroupInfo info, const std::string& key) {
  using Type = c10d::ProcessGroup::BackendType;
  const int rank = info.rank, size = info.size();
  const std::string name = backend_for_group(source.options, source.processes, info.ranks);
  const bool gloo = name == "gloo", fake = name == "fake";
  auto backend =
      size == 1 && !fake ? make_one_rank_backend(std::move(info)) : make_backend(name, source, std::move(info), key);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
  const Type type = gloo ? Type::GLOO : Type::CUSTOM;
  group->setBackend(c10::DeviceType::CPU, type, backend);
  if (fake) {
    group->setBackend(c10::DeviceType::CUDA, type, backend);
  }
  group->setDefaultBackend(type);
  group->setGroupName(key);
  return group;
}

const GroupInfo& info_of(const ProcessGroupPtr& group) {
  TESSERA_CHECK(ValueError, group, "the process group is undefined; make one by init_process_group or new_group");
  const auto backend = group->getDefaultBackend();
  const auto* ours = dynamic_cast<const GroupBackend*>(backend.get());
  TESSERA_CHECK(ValueError, ours, "the process group's backend \"{}\" was not made by this library",
                backend->getBackendName());
  return ours->info();
}

const ProcessGroupPtr& require_default_group(const char* caller) {
  const ProcessGroupPtr& group = detail::rank_state().default_group;
  TESSERA_CHECK(StateError, group, "{}: there is no default process group; call init_process_group() first", caller);
  return group;
}

}  // namespace

StoreHandle::StoreHandle(c10::intrusive_ptr<c10d::Store> store) {
  if (store) {
    store_ = std::make_shared<c10::intrusive_ptr<c10d::Store>>(std::move(store));
  }
}

void init_process_group(ProcessGroupOptions options) {
  detail::RankState& state = detail::rank_state();
  TESSERA_CHECK(StateError, !state.default_group,
                "init_process_group: the default process group is set up already; call destroy_process_group() first");
  TESSERA_CHECK(ValueError, options.timeout.count() > 0, "init_process_group: timeout {} ms; it must be above 0",
                options.timeout.count());
  resolve_ranks(options);
  resolve_backend(options);
  resolve_store(options);
  GroupInfo info = {.name = "default", .ranks = {}, .rank = options.rank, .timeout = options.timeout};
  info.ranks.resize(options.world_size);
  std::iota(info.ranks.begin(), info.ranks.end(), 0);
  const std::string key = fmt::format("default/{}", state.init_count);
  std::vector<HostProcess> processes = find_processes(options, key);
  state.default_group = make_group({options, processes}, std::move(info), key);
  state.options = std::move(options);
  state.processes = std::move(processes);
  state.group_counts.clear();
  ++state.init_count;
}

void destroy_process_group() {
  require_default_group("destroy_process_group");
  detail::RankState& state = detail::rank_state();
  state.default_group.reset();
  state.options = {};
  state.processes.clear();
}

bool is_initialized() {
  return detail::rank_state().default_group.defined();
}

const ProcessGroupPtr& default_group() {
  return require_default_group("default_group");
}

int get_rank() {
  return info_of(require_default_group("get_rank")).rank;
}

int get_world_size() {
  return info_of(require_default_group("get_world_size")).size();
}

int get_rank(const ProcessGroupPtr& group) {
  return info_of(group).rank;
}

int get_world_size(const ProcessGroupPtr& group) {
  return info_of(group).size();
}

std::string get_backend(const ProcessGroupPtr& group) {
  info_of(group);  // says so where the group is none of ours
  return group->getDefaultBackend()->getBackendName();
}

const std::string& group_name(const ProcessGroupPtr& group) {
  return info_of(group).name;
}

std::vector<int64_t> group_ranks(const ProcessGroupPtr& group) {
  return info_of(group).ranks;
}

ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name) {
  const GroupInfo& world = info_of(require_default_group("new_group"));
  std::vector<int64_t> sorted = ranks;
  std::ranges::sort(sorted);
  TESSERA_CHECK(ValueError, !ranks.empty(), "new_group(\"{}\"): no ranks; at least the caller must be a member", name);
  TESSERA_CHECK(ValueError, sorted.front() >= 0 && sorted.back() < world.size(),
                "new_group(\"{}\"): ranks [{}]; the default group has ranks 0 to {}", name, fmt::join(ranks, ", "),
                world.size() - 1);
  TESSERA_CHECK(ValueError, std::ranges::adjacent_find(sorted) == sorted.end(),
                "new_group(\"{}\"): ranks [{}]; each may be there once", name, fmt::join(ranks, ", "));
  const auto place = std::ranges::find(ranks, world.rank);
  TESSERA_CHECK(ValueError, place != ranks.end(),
                "new_group(\"{}\"): ranks [{}] are without the caller, rank {}; only members call it", name,
                fmt::join(ranks, ", "), world.rank);
  detail::RankState& state = detail::rank_state();
  const std::string set = fmt::format("{}[{}]", name, fmt::join(ranks, ","));
  const std::string key = fmt::format("{}/{}/{}", state.init_count, set, state.group_counts[set]++);
  return make_group(
      {state.options, state.processes},
      {.name = name, .ranks = ranks, .rank = static_cast<int>(place - ranks.begin()), .timeout = state.options.timeout},
      key);
}

}  // namespace tessera
