#include "comm/launch/rank_environment.h"

#include <map>

#include "base/error.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

EnvironmentLookup lookup_in(const std::map<std::string, std::string>& variables) {
  return [&variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

RankEnvironment parse(const std::map<std::string, std::string>& variables) {
  return parse_rank_environment(lookup_in(variables));
}

TEST_CASE("no launcher: one rank, no network") {
  CHECK(parse({}) == RankEnvironment{0, 1, 0, "", 0});
  CHECK(parse({{"MASTER_ADDR", "somewhere"}, {"MASTER_PORT", "77"}}) == RankEnvironment{0, 1, 0, "", 0});
}

TEST_CASE("ranks on a host") {
  const auto ranks = [](const std::map<std::string, std::string>& variables) {
    return parse_local_world_size(lookup_in(variables));
  };
  CHECK(ranks({}) == std::nullopt);
  CHECK(ranks({{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}}) == 2);
  CHECK(ranks({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}) ==
        4);
  CHECK(ranks({{"PMI_RANK", "1"}, {"PMI_SIZE", "8"}, {"MPI_LOCALNRANKS", "2"}}) == 2);
  CHECK(ranks({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "1"}}) == std::nullopt);
  CHECK(ranks({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"LOCAL_WORLD_SIZE", "4"}}) == 4);
  CHECK_THROWS_WITH(ranks({{"LOCAL_WORLD_SIZE", "two"}}), ContainsSubstring("LOCAL_WORLD_SIZE=\"two\""));
}

TEST_CASE("torchrun") {
  CHECK(parse({{"RANK", "3"},
               {"WORLD_SIZE", "4"},
               {"LOCAL_RANK", "1"},
               {"MASTER_ADDR", "node1"},
               {"MASTER_PORT", "1234"}}) == RankEnvironment{3, 4, 1, "node1", 1234});
  CHECK(parse({{"RANK", "0"}, {"WORLD_SIZE", "1"}}) == RankEnvironment{0, 1, 0, "", 0});
}

TEST_CASE("mpirun: all ranks on this host meet on the loopback interface") {
  CHECK(parse({{"OMPI_COMM_WORLD_RANK", "1"},
               {"OMPI_COMM_WORLD_SIZE", "2"},
               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
               {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}) == RankEnvironment{1, 2, 1, "127.0.0.1", 29500});
  CHECK_THROWS_WITH(
      parse({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
      ContainsSubstring("MASTER_ADDR is not set"));
}

TEST_CASE("mpiexec") {
  CHECK(parse({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "5"}}) ==
        RankEnvironment{1, 2, -1, "a", 5});
}

TEST_CASE("srun: the first host of the step, a port of the job's own") {
  const RankEnvironment environment = parse({{"SLURM_PROCID", "5"},
                                             {"SLURM_STEP_NUM_TASKS", "8"},
                                             {"SLURM_NTASKS", "16"},
                                             {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"},
                                             {"SLURM_LOCALID", "1"},
                                             {"SLURM_JOB_ID", "12345"},
                                             {"SLURM_STEP_NODELIST", "gpu[03-04,09],login"}});
  CHECK(environment == RankEnvironment{5, 8, 1, "gpu03", 20000 + (12345 * 17) % 10000});
  CHECK(
      parse({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "x"}, {"MASTER_ADDR", "y"}})
          .master_addr == "y");
  CHECK_THROWS_WITH(parse({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}),
                    ContainsSubstring("MASTER_ADDR is not set, but SLURM_STEP_NUM_TASKS=2"));
}

TEST_CASE("srun that also sets PMI's variables is srun; mpirun and mpiexec inside of a step are not") {
  const std::map<std::string, std::string> srun = {{"SLURM_PROCID", "1"},
                                                   {"SLURM_STEP_NUM_TASKS", "2"},
                                                   {"SLURM_LOCALID", "0"},
                                                   {"SLURM_STEP_NODELIST", "gpu[3-4]"}};
  const auto inside = [&](std::map<std::string, std::string> variables) {
    variables.insert(srun.begin(), srun.end());
    return parse(variables);
  };
  CHECK(inside({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}) == RankEnvironment{1, 2, 0, "gpu3", 20000});
  CHECK(inside({{"PMI_RANK", "3"}, {"PMI_SIZE", "8"}, {"MASTER_ADDR", "a"}}) == RankEnvironment{3, 8, -1, "a", 29500});
  CHECK(inside({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "a"}}) == RankEnvironment{0, 2, -1, "a", 29500});
  CHECK(inside({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}) ==
        RankEnvironment{1, 2, -1, "a", 29500});
  CHECK_THROWS_AS(inside({{"PMI_RANK", "1"}}), ValueError);
}

TEST_CASE("a shell of salloc and a script of sbatch are no ranks") {
  CHECK(parse({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_NODELIST", "a,b"}}).world_size == 1);
  CHECK(parse({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}).world_size == 1);
}

TEST_CASE("who is a rank starts no further ones") {
  using Variables = std::map<std::string, std::string>;
  const auto launched = [](const Variables& variables) { return is_launched(lookup_in(variables)); };
  CHECK_FALSE(launched({}));
  CHECK(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  Variables ranks = {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}};
  CHECK(launched(ranks));
  for (const auto& [rank, world_size] : {std::pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                                         {"PMI_RANK", "PMI_SIZE"},
                                         {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}}) {
    CAPTURE(rank);
    ranks = {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}, {rank, "0"}, {world_size, "2"}};
    CHECK(launched(ranks));
    ranks[world_size] = "1";
    CHECK_FALSE(launched(ranks));
  }
  CHECK_THROWS_AS(launched({{"PMI_RANK", "0"}}), ValueError);
}

TEST_CASE("what tells a job from another one") {
  const auto job = [](const std::map<std::string, std::string>& variables) {
    return parse_job_identity(lookup_in(variables));
  };
  CHECK(job({}).empty());
  CHECK(job({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).empty());
  CHECK(job({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "a"}}) == "torchrun a");
  CHECK(job({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "none"}}).empty());
  CHECK(job({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "a"}, {"TESSERA_JOB_ID", "b"}}) == "b");
  CHECK(job({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_NAMESPACE", "5@1"}}) == "mpi 5@1");
  CHECK(job({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_MCA_ess_base_jobid", "7"}}) ==
        "mpi 7");
  CHECK(job({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).empty());
  CHECK(job({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "3"}}) ==
        "slurm 12.3");
  // A script that sets RANK may start the ranks of one job by several steps.
  CHECK(job({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"SLURM_JOB_ID", "12"}, {"SLURM_STEP_ID", "3"}}).empty());
}

TEST_CASE("the first host of a list as SLURM writes it") {
  CHECK(first_host("node1") == "node1");
  CHECK(first_host("node1,node2") == "node1");
  CHECK(first_host("a,b[1-2]") == "a");
  CHECK(first_host("node[7]") == "node7");
  CHECK(first_host("node[007-012,15],other") == "node007");
  CHECK(first_host("") == "");
}

TEST_CASE("a mistake names the variable and its value") {
  const auto with = [](std::map<std::string, std::string> changes) {
    std::map<std::string, std::string> variables = {
        {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
    for (const auto& [name, value] : changes) {
      variables[name] = value;
    }
    std::erase_if(variables, [](const auto& entry) { return entry.second == "unset"; });
    return [variables] { parse(variables); };
  };
  CHECK_NOTHROW(with({})());
  CHECK_THROWS_AS(with({{"RANK", "one"}})(), ValueError);
  CHECK_THROWS_WITH(with({{"RANK", "one"}})(), ContainsSubstring("RANK=\"one\" is not a number"));
  CHECK_THROWS_WITH(with({{"RANK", "1x"}})(), ContainsSubstring("RANK=\"1x\""));
  CHECK_THROWS_WITH(with({{"RANK", "-1"}})(), ContainsSubstring("RANK=\"-1\""));
  CHECK_THROWS_WITH(with({{"RANK", ""}})(), ContainsSubstring("RANK=\"\""));
  CHECK_THROWS_WITH(with({{"RANK", "2"}})(), ContainsSubstring("RANK=2 and WORLD_SIZE=2: ranks are 0 to 1"));
  CHECK_THROWS_WITH(with({{"RANK", "unset"}})(), ContainsSubstring("WORLD_SIZE is set, but RANK is not"));
  CHECK_THROWS_WITH(with({{"WORLD_SIZE", "unset"}})(), ContainsSubstring("RANK is set, but WORLD_SIZE is not"));
  CHECK_THROWS_WITH(with({{"WORLD_SIZE", "0"}})(), ContainsSubstring("WORLD_SIZE=0"));
  CHECK_THROWS_WITH(with({{"LOCAL_RANK", "1"}})(), ContainsSubstring("LOCAL_RANK=1 and RANK=0"));
  CHECK_THROWS_WITH(with({{"MASTER_PORT", "70000"}})(), ContainsSubstring("MASTER_PORT=70000"));
  CHECK_THROWS_WITH(with({{"MASTER_PORT", "unset"}})(), ContainsSubstring("MASTER_PORT is not set"));
  CHECK_THROWS_WITH(with({{"MASTER_ADDR", "unset"}})(), ContainsSubstring("MASTER_ADDR is not set, but WORLD_SIZE=2"));
}

}  // namespace
}  // namespace tessera
