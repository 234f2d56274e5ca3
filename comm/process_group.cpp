#include "comm/process_group.h"

#include <ATen/Context.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/error.h"
#include "base/report.h"
#include "comm/backend/group_backend.h"
#include "comm/backend_choice.h"
#include "comm/backend_spec.h"
#include "comm/context/flight_record.h"
#include "comm/context/rank_context.h"
#include "comm/context/rank_state.h"
#include "comm/launch/job_secret.h"
#include "comm/launch/rank_environment.h"
#include "comm/launch/store.h"
#include "comm/make_group.h"
#include "comm/nccl/nccl_backend.h"
#include "comm/threads/thread_world.h"

namespace tessera {

namespace {

/// Returns the rank's number on its host; -1 if unknown.
int resolve_ranks(ProcessGroupOptions& options) {
  TESSERA_CHECK(ValueError, (options.rank == -1) == (options.world_size == -1),
                "init_process_group: rank {} and world_size {}; give both, or neither to read the environment",
                options.rank, options.world_size);
  int local_rank = -1;
  if (options.rank == -1) {
    const RankEnvironment environment = rank_environment();
    local_rank = environment.local_rank;
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
  return local_rank;
}

// Sets the CPU's backend in the options: "" if each group chooses between shm and gloo. Returns the backend for CUDA.
std::string resolve_backend(ProcessGroupOptions& options) {
  std::string& backend = options.backend;
  if (backend.empty()) {
    const std::string wish = backend_from_environment();
    backend = options.thread_world || options.world_size == 1 ? "threads" : wish;
  }
  const BackendSpec spec = parse_backend(backend);
  const bool nccl = spec.cuda == "nccl";
  if (nccl) {
    check_nccl_is_built();
  }
  TESSERA_CHECK(
      ValueError, !nccl || (spec.cpu != "threads" && !options.thread_world),
      "init_process_group: backend \"{}\" for ranks as threads; NCCL needs ranks as processes, a GPU for each",
      backend);
  backend = spec.cpu;
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
  // Without a GPU, or in a build without CUDA, meshes of CUDA ranks are rejected with a clear error.
  return spec.cuda == "threads" && !at::hasCUDA() ? BackendSpec::kNone : spec.cuda;
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
                                 .timeout = options.timeout,
                                 .job = parse_job_identity(process_variable),
                                 .secret = parse_job_secret(process_variable)});
}

/// Returns this rank's GPU and makes it the current one. All ranks must call it.
CudaUse resolve_nccl(const ProcessGroupOptions& options, const NcclOptions& nccl, int local_rank,
                     const std::string& key) {
  std::vector<DeviceReport> reports;
  const DeviceReport own = report_devices(local_rank, nccl.device);
  try {
    reports = exchange_reports(*c10::make_intrusive<c10d::PrefixStore>(key, *options.store.get()), options.rank,
                               options.world_size, own);
  } catch (const std::exception& failure) {
    throw CommError(fmt::format("init_process_group: rank {} of {} could not learn which GPUs the other ranks see: {}",
                                options.rank, options.world_size, failure.what()));
  }
  const int device = choose_devices(reports)[options.rank];
  use_cuda_device(device);
  return {.backend = "nccl", .device = device, .options = nccl};
}

/// Only logs a failure, because a run does not need its record.
void keep_flight_record(int rank, int world_size) {
  const char* const folder = std::getenv(kFlightVariable);
  if (folder == nullptr || *folder == '\0') {
    return;
  }
  try {
    FlightRecord::of_rank()->keep_in(flight_path(folder, rank), rank, world_size);
  } catch (const Error& failure) {
    report_failure("{}: {}", kFlightVariable, failure.what());
  }
}

const GroupInfo& group_info(const ProcessGroupPtr& group) {
  TESSERA_CHECK(ValueError, group, "the process group is undefined; make one by init_process_group or new_group");
  const auto backend = group->getDefaultBackend();
  const auto* ours = dynamic_cast<const GroupBackend*>(backend.get());
  TESSERA_CHECK(ValueError, ours,
                "the process group's backend \"{}\" was not made by this library; adopt_group() makes a group over it",
                backend->getBackendName());
  return ours->info();
}

const ProcessGroupPtr& require_default_group(const char* caller) {
  const ProcessGroupPtr& group = rank_local<DefaultGroup>()->group;  // lives as long as the rank context
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
  init_process_group(std::move(options), NcclOptions{});
}

void init_process_group(ProcessGroupOptions options, const NcclOptions& nccl) {
  DefaultGroup& own = *rank_local<DefaultGroup>();
  TESSERA_CHECK(StateError, !own.group,
                "init_process_group: the default process group is set up already; call destroy_process_group() first");
  TESSERA_CHECK(ValueError, options.timeout.count() > 0, "init_process_group: timeout {} ms; it must be above 0",
                options.timeout.count());
  options.timeout = std::min(options.timeout, kLongestTimeout);
  const int local_rank = resolve_ranks(options);
  const std::string cuda = resolve_backend(options);
  keep_flight_record(options.rank, options.world_size);
  resolve_store(options);
  GroupInfo info = {.name = "default", .ranks = {}, .rank = options.rank, .timeout = options.timeout};
  info.ranks.resize(options.world_size);
  std::iota(info.ranks.begin(), info.ranks.end(), 0);
  const std::string key =
      fmt::format("default/{}", detail::rank_state().init_count++);  // for this attempt, successful or not
  std::vector<HostProcess> processes = find_processes(options, key);
  CudaUse use = cuda == "nccl" ? resolve_nccl(options, nccl, local_rank, key) : CudaUse{.backend = cuda};
  ProcessGroupPtr group = make_group({options, processes, use}, std::move(info), key);
  own = {.group = std::move(group),
         .options = std::move(options),
         .processes = std::move(processes),
         .cuda = std::move(use)};
}

void destroy_process_group() {
  require_default_group("destroy_process_group");
  *rank_local<DefaultGroup>() = {};
}

bool is_initialized() {
  return rank_local<DefaultGroup>()->group.defined();
}

const ProcessGroupPtr& default_group() {
  return require_default_group("default_group");
}

int get_rank() {
  return group_info(require_default_group("get_rank")).rank;
}

int get_world_size() {
  return group_info(require_default_group("get_world_size")).size();
}

int get_rank(const ProcessGroupPtr& group) {
  return group_info(group).rank;
}

int get_world_size(const ProcessGroupPtr& group) {
  return group_info(group).size();
}

std::string get_backend(const ProcessGroupPtr& group) {
  group_info(group);  // throws for a group of another library
  std::string name = group->getDefaultBackend()->getBackendName();
  for (const c10::Device device : group->getDeviceTypes()) {
    const std::string other = group->getBackend(device.type())->getBackendName();
    if (other != name) {
      return fmt::format("cpu:{},cuda:{}", name, other);
    }
  }
  return name;
}

bool has_backend(const ProcessGroupPtr& group, c10::DeviceType device_type) {
  const auto devices = group->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const c10::Device& device) { return device.type() == device_type; });
}

const std::string& group_name(const ProcessGroupPtr& group) {
  return group_info(group).name;
}

std::vector<int64_t> group_ranks(const ProcessGroupPtr& group) {
  return group_info(group).ranks;
}

ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name) {
  return new_group(ranks, name, rank_local<DefaultGroup>()->cuda.options);
}

ProcessGroupPtr new_group(const std::vector<int64_t>& ranks, const std::string& name, const NcclOptions& nccl) {
  GroupInfo info = info_of_members("new_group", ranks, name);
  DefaultGroup& own = *rank_local<DefaultGroup>();
  const std::string set = fmt::format("{}[{}]", name, fmt::join(ranks, ","));
  const std::string key = fmt::format("{}/{}/{}", detail::rank_state().init_count, set, own.group_counts[set]++);
  CudaUse use = own.cuda;
  use.options = nccl;
  return make_group({own.options, own.processes, use}, std::move(info), key);
}

GroupInfo info_of_members(const char* caller, const std::vector<int64_t>& ranks, const std::string& name) {
  const GroupInfo& world = group_info(require_default_group(caller));
  std::vector<int64_t> sorted = ranks;
  std::ranges::sort(sorted);
  TESSERA_CHECK(ValueError, !ranks.empty(), "{}(\"{}\"): no ranks; at least the caller must be a member", caller, name);
  TESSERA_CHECK(ValueError, sorted.front() >= 0 && sorted.back() < world.size(),
                "{}(\"{}\"): ranks [{}]; the default group has ranks 0 to {}", caller, name, fmt::join(ranks, ", "),
                world.size() - 1);
  TESSERA_CHECK(ValueError, std::ranges::adjacent_find(sorted) == sorted.end(),
                "{}(\"{}\"): ranks [{}]; each may be there once", caller, name, fmt::join(ranks, ", "));
  const auto place = std::ranges::find(ranks, world.rank);
  TESSERA_CHECK(ValueError, place != ranks.end(),
                "{}(\"{}\"): ranks [{}] are without the caller, rank {}; only members call it", caller, name,
                fmt::join(ranks, ", "), world.rank);
  return {.name = name,
          .ranks = ranks,
          .rank = static_cast<int>(place - ranks.begin()),
          .timeout = rank_local<DefaultGroup>()->options.timeout};
}

}  // namespace tessera
