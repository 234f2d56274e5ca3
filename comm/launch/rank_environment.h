#pragma once
// Reads this process's rank from the variables that launchers set.
//
//   launcher   rank                     ranks                   on this host
//   torchrun   RANK                     WORLD_SIZE              LOCAL_RANK
//   mpirun     OMPI_COMM_WORLD_RANK     OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK
//   mpiexec    PMI_RANK                 PMI_SIZE                MPI_LOCALRANKID
//   srun       SLURM_PROCID             SLURM_STEP_NUM_TASKS    SLURM_LOCALID
//
// The first launcher with a rank or ranks variable counts; srun needs SLURM_STEP_NUM_TASKS. Without any there is one
// rank. Ranks meet at MASTER_ADDR:MASTER_PORT; docs/semantics.md has the defaults.

#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;       // on its host; -1 if the launcher does not set it
  std::string master_addr;  // may be "" for a single rank
  int master_port = 0;      // may be 0 for a single rank

  bool operator==(const RankEnvironment&) const = default;
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

std::optional<std::string> process_variable(const std::string& name);  // lookup in this process's environment

/// Reads rank and rendezvous address. Throws ValueError that names variable and value for text that is not a number, a
/// rank out of range, one variable of a pair without the other, and several ranks without a place to meet.
RankEnvironment parse_rank_environment(const EnvironmentLookup& lookup);

RankEnvironment rank_environment();  // of this process

/// Returns whether RANK is set or another launcher started several ranks. Throws like parse_rank_environment().
bool is_launched(const EnvironmentLookup& lookup);

/// Returns the number of ranks on this host; srun does not set it. Throws ValueError if it is not a number.
std::optional<int64_t> parse_local_world_size(const EnvironmentLookup& lookup);

constexpr const char* kJobVariable = "TESSERA_JOB_ID";  // identity of a job, set by its user or launch_local
constexpr const char* kRestartVariable = "TORCHELASTIC_RESTART_COUNT";  // of torchrun or launch_local

/// Returns a text that distinguishes the job from others at its address (docs/semantics.md), or "". It is not a secret.
std::string parse_job_identity(const EnvironmentLookup& lookup);

std::string first_host(const std::string& host_list);  // in SLURM's syntax: "node[03-07,12],login" -> "node03"

}  // namespace tessera
