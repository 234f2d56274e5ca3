#pragma once
// Which rank this process is, read from the variables that launchers set.
//
//   launcher   rank                     ranks                   on this host
//   torchrun   RANK                     WORLD_SIZE              LOCAL_RANK
//   mpirun     OMPI_COMM_WORLD_RANK     OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK
//   mpiexec    PMI_RANK                 PMI_SIZE                MPI_LOCALRANKID
//   srun       SLURM_PROCID             SLURM_STEP_NUM_TASKS    SLURM_LOCALID
//
// The first launcher in the table counts that has a variable of the first two columns set (for srun only
// SLURM_STEP_NUM_TASKS, since salloc shells and sbatch scripts set SLURM_PROCID too). With none set there is one rank
// and no network. Where srun serves PMI-2 and sets mpiexec's variables to the same numbers, it counts as srun.
// Ranks meet at MASTER_ADDR:MASTER_PORT. Without them: under srun the step's first host and a port made from the job
// id; under mpirun and mpiexec 127.0.0.1 if all ranks are on this host, and port 29500.

#include <functional>
#include <optional>
#include <string>

namespace tessera {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  /// The rank's number on its host; -1 where the launcher does not tell.
  int local_rank = 0;
  /// "" and 0 for a single rank without MASTER_ADDR.
  std::string master_addr;
  int master_port = 0;

  bool operator==(const RankEnvironment&) const = default;
};

using EnvironmentLookup = std::function<std::optional<std::string>(const std::string& name)>;

/// The process's own variable.
std::optional<std::string> process_variable(const std::string& name);

/// Throws ValueError that names variable and value: not a number, a rank outside the ranks, one of a pair missing, no
/// way to know where the ranks meet.
RankEnvironment parse_rank_environment(const EnvironmentLookup& lookup);

/// The process's own environment.
RankEnvironment rank_environment();

/// Returns true if a launcher started this process as a rank: RANK is set, or another launcher started more than one.
/// (A single process of srun or mpirun may start ranks itself.) Throws as parse_rank_environment.
bool is_launched(const EnvironmentLookup& lookup);

/// How many ranks are on this one's host: LOCAL_WORLD_SIZE, or else what mpirun and mpiexec tell
/// (OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS); srun does not. Throws ValueError for what is no number.
std::optional<int64_t> parse_local_world_size(const EnvironmentLookup& lookup);

/// The identity of a job that its user, or launch_local, gives it.
constexpr const char* kJobVariable = "TESSERA_JOB_ID";

/// Returns the identity, no secret, by which the ranks' job differs from others at the same address. It is
/// TESSERA_JOB_ID, which launch_local sets and a user may; else torchrun's TORCHELASTIC_RUN_ID (but "none", its
/// default), mpirun's PMIX_NAMESPACE or OMPI_MCA_ess_base_jobid, mpiexec's PMIX_NAMESPACE, srun's SLURM_JOB_ID and
/// SLURM_STEP_ID. "" where there is none, as where RANK is set by hand: a user who starts several such jobs at one
/// address sets TESSERA_JOB_ID.
std::string parse_job_identity(const EnvironmentLookup& lookup);

/// "node[03-07,12],login" -> "node03"; a list of hosts as SLURM writes it.
std::string first_host(const std::string& host_list);

}  // namespace tessera
