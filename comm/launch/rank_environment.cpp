#include "comm/launch/rank_environment.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

#include "base/error.h"

namespace tessera {

namespace {

constexpr int kDefaultPort = 29500;

struct Launcher {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
};

constexpr Launcher kTorchrun = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Launcher kOpenMpi = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Launcher kPmi = {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr Launcher kSlurm = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr};
constexpr const Launcher* kLaunchers[] = {&kTorchrun, &kOpenMpi, &kPmi, &kSlurm};

std::optional<int64_t> integer(const EnvironmentLookup& lookup, const char* variable) {
  const std::optional<std::string> text = lookup(variable);
  if (!text) {
    return std::nullopt;
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  TESSERA_CHECK(ValueError, error == std::errc() && end == text->data() + text->size() && value >= 0,
                "environment variable {}=\"{}\" is not a number; a whole number from 0 on is needed", variable, *text);
  return value;
}

/// Returns whether srun, serving PMI-2, has set PMI's variables too. Those of an mpiexec inside a step count other
/// ranks, or one per task.
bool is_srun_with_pmi(const EnvironmentLookup& lookup) {
  const auto rank = lookup(kPmi.rank), world_size = lookup(kPmi.world_size);
  return rank && world_size && rank == lookup(kSlurm.rank) && world_size == lookup(kSlurm.world_size);
}

const Launcher* find_launcher(const EnvironmentLookup& lookup) {
  for (const Launcher* launcher : kLaunchers) {
    if (launcher == &kPmi && is_srun_with_pmi(lookup)) {
      continue;
    }
    if (lookup(launcher->world_size) || (launcher != &kSlurm && lookup(launcher->rank))) {
      return launcher;
    }
  }
  return nullptr;
}

void read_ranks(const EnvironmentLookup& lookup, const Launcher& launcher, RankEnvironment& result) {
  const std::optional<int64_t> rank = integer(lookup, launcher.rank);
  const std::optional<int64_t> world_size = integer(lookup, launcher.world_size);
  TESSERA_CHECK(ValueError, rank && world_size, "environment variable {} is set, but {} is not; set both or neither",
                rank ? launcher.rank : launcher.world_size, rank ? launcher.world_size : launcher.rank);
  TESSERA_CHECK(ValueError, *world_size >= 1 && *world_size < (1 << 30),
                "environment variable {}={}: the number of ranks must be at least 1", launcher.world_size, *world_size);
  TESSERA_CHECK(ValueError, *rank < *world_size, "environment variables {}={} and {}={}: ranks are 0 to {}",
                launcher.rank, *rank, launcher.world_size, *world_size, *world_size - 1);
  const std::optional<int64_t> local_rank = integer(lookup, launcher.local_rank);
  TESSERA_CHECK(ValueError, !local_rank || *local_rank <= *rank,
                "environment variables {}={} and {}={}: a local rank cannot be above the rank", launcher.local_rank,
                local_rank.value_or(0), launcher.rank, *rank);
  result.rank = static_cast<int>(*rank);
  result.world_size = static_cast<int>(*world_size);
  result.local_rank = static_cast<int>(local_rank.value_or(*world_size == 1 ? 0 : -1));
}

/// Reads MASTER_ADDR and MASTER_PORT. If absent, they are "" and 0.
void read_master(const EnvironmentLookup& lookup, RankEnvironment& result) {
  result.master_addr = lookup("MASTER_ADDR").value_or("");
  const std::optional<int64_t> port = integer(lookup, "MASTER_PORT");
  TESSERA_CHECK(ValueError, !port || (*port >= 1 && *port <= 65535),
                "environment variable MASTER_PORT={}: a port is 1 to 65535", *port);
  result.master_port = static_cast<int>(port.value_or(0));
}

// Rank 0 is on the step's first host; SLURM_LAUNCH_NODE_IPADDR would be where srun was called, such as a login node.
// Jobs that share a host must not meet at the same port; 20000 to 29999 is below the ports that systems hand out.
void find_slurm_master(const EnvironmentLookup& lookup, RankEnvironment& result) {
  if (result.master_addr.empty()) {
    result.master_addr = first_host(lookup("SLURM_STEP_NODELIST").value_or(""));
  }
  if (result.master_port == 0) {
    const int64_t job = integer(lookup, "SLURM_JOB_ID").value_or(0);
    const int64_t step = integer(lookup, "SLURM_STEP_ID").value_or(0);
    result.master_port = static_cast<int>(20000 + (job * 17 + step) % 10000);
  }
}

void find_mpi_master(const EnvironmentLookup& lookup, const Launcher& launcher, RankEnvironment& result) {
  if (result.master_addr.empty() && integer(lookup, launcher.local_world_size) == result.world_size) {
    result.master_addr = "127.0.0.1";
  }
  if (result.master_port == 0) {
    result.master_port = kDefaultPort;
  }
}

}  // namespace

std::string first_host(const std::string& host_list) {
  const size_t bracket = host_list.find('[');
  const size_t comma = host_list.find(',');
  if (bracket == std::string::npos || comma < bracket) {
    return host_list.substr(0, comma);
  }
  const size_t number_end = host_list.find_first_of("-,]", bracket);
  return host_list.substr(0, bracket) + host_list.substr(bracket + 1, number_end - bracket - 1);
}

RankEnvironment parse_rank_environment(const EnvironmentLookup& lookup) {
  RankEnvironment result;
  const Launcher* launcher = find_launcher(lookup);
  if (launcher == nullptr) {
    return result;
  }
  read_ranks(lookup, *launcher, result);
  read_master(lookup, result);
  if (result.world_size == 1) {
    return result;
  }
  if (launcher == &kSlurm) {
    find_slurm_master(lookup, result);
  } else if (launcher != &kTorchrun) {
    find_mpi_master(lookup, *launcher, result);
  }
  TESSERA_CHECK(ValueError, !result.master_addr.empty(),
                "environment variable MASTER_ADDR is not set, but {}={}: set it to the address of the host of rank 0",
                launcher->world_size, result.world_size);
  TESSERA_CHECK(ValueError, result.master_port != 0,
                "environment variable MASTER_PORT is not set, but {}={}: set it to a free port of rank 0's host",
                launcher->world_size, result.world_size);
  return result;
}

std::optional<int64_t> parse_local_world_size(const EnvironmentLookup& lookup) {
  if (const auto given = integer(lookup, kTorchrun.local_world_size)) {
    return given;
  }
  const Launcher* launcher = find_launcher(lookup);
  return launcher && launcher->local_world_size ? integer(lookup, launcher->local_world_size) : std::nullopt;
}

std::string parse_job_identity(const EnvironmentLookup& lookup) {
  const auto text = [&](const char* name) { return lookup(name).value_or(""); };
  const auto named = [](const char* launcher, const std::string& id) {
    return id.empty() ? "" : fmt::format("{} {}", launcher, id);
  };
  if (std::string given = text(kJobVariable); !given.empty()) {
    return given;
  }
  const Launcher* launcher = find_launcher(lookup);
  if (launcher == &kTorchrun) {
    const std::string run = text("TORCHELASTIC_RUN_ID");
    return run == "none" ? "" : named("torchrun", run);
  }
  if (launcher == &kSlurm) {
    const std::string job = text("SLURM_JOB_ID");
    return named("slurm", job.empty() ? "" : fmt::format("{}.{}", job, text("SLURM_STEP_ID")));
  }
  if (launcher == nullptr) {
    return "";
  }
  const std::string space = text("PMIX_NAMESPACE");
  return named("mpi", space.empty() && launcher == &kOpenMpi ? text("OMPI_MCA_ess_base_jobid") : space);
}

std::optional<std::string> process_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

RankEnvironment rank_environment() {
  return parse_rank_environment(process_variable);
}

bool is_launched(const EnvironmentLookup& lookup) {
  return lookup(kTorchrun.rank) || parse_rank_environment(lookup).world_size > 1;
}

}  // namespace tessera
