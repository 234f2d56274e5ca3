#include "comm/launcher/local_launcher.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "base/error.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using testing::read_file;
using testing::TempFolder;
using Clock = std::chrono::steady_clock;

LaunchResult launch(int nproc, const std::string& script, std::vector<std::string> output_files = {}) {
  return launch_ranks({.nproc = nproc, .argv = {"/bin/sh", "-c", script}, .output_files = std::move(output_files)});
}

TEST_CASE("ranks find their numbers and the master's address in the environment") {
  const TempFolder folder;
  unsetenv("OMP_NUM_THREADS");
  const LaunchResult result = launch(
      2, "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR ${MASTER_PORT:+port} $OMP_NUM_THREADS",
      {folder.path("0"), folder.path("1")});
  CHECK(result.exit_code == 0);
  CHECK(result.message.empty());
  const std::string threads = std::to_string(std::max(1u, std::thread::hardware_concurrency() / 2));
  CHECK(read_file(folder.path("0")) == "0 2 0 2 127.0.0.1 port " + threads + "\n");
  CHECK(read_file(folder.path("1")) == "1 2 1 2 127.0.0.1 port " + threads + "\n");
}

TEST_CASE("the ranks of a launch have an identity that is not another one's") {
  const TempFolder folder;
  for (const std::string job : {"a", "b"}) {
    launch(2, "echo $TESSERA_JOB_ID", {folder.path(job + "0"), folder.path(job + "1")});
  }
  CHECK(read_file(folder.path("a0")).size() > 10);
  CHECK(read_file(folder.path("a0")) == read_file(folder.path("a1")));
  CHECK(read_file(folder.path("a0")) != read_file(folder.path("b0")));
}

TEST_CASE("the ranks of a launch have its secret, or the launcher's; no command line and no message shows it") {
  const TempFolder folder;
  const auto secret_of_ranks = [&] {
    const LaunchResult result = launch(
        2, "echo $TESSERA_JOB_SECRET; tr '\\0' ' ' </proc/$$/cmdline >" + folder.path("command") + "$RANK; exit 3",
        {folder.path("0"), folder.path("1")});
    const std::string secret = read_file(folder.path("0"));
    CHECK(read_file(folder.path("1")) == secret);
    CHECK_THAT(read_file(folder.path("command0")), ContainsSubstring("/bin/sh") && !ContainsSubstring(secret));
    CHECK_THAT(result.message, ContainsSubstring("exit code 3") && !ContainsSubstring(secret));
    return secret.substr(0, secret.find('\n'));
  };
  unsetenv("TESSERA_JOB_SECRET");
  const std::string one = secret_of_ranks();
  CHECK(one.size() == 64);
  CHECK(secret_of_ranks() != one);
  CHECK(std::getenv("TESSERA_JOB_SECRET") == nullptr);
  setenv("TESSERA_JOB_SECRET", "a secret of the user's", 1);
  CHECK(secret_of_ranks() == "a secret of the user's");
  for (const char* unfit : {"", "short"}) {
    setenv("TESSERA_JOB_SECRET", unfit, 1);
    CHECK_THROWS_AS(launch(1, "true"), ValueError);
  }
  unsetenv("TESSERA_JOB_SECRET");
}

TEST_CASE("ranks keep their heap unless malloc is tuned already") {
  const TempFolder folder;
  const auto heap_of_rank = [&] {
    launch(1, "echo $MALLOC_TRIM_THRESHOLD_ $MALLOC_MMAP_THRESHOLD_ $GLIBC_TUNABLES", {folder.path("0")});
    return read_file(folder.path("0"));
  };
  for (const char* name :
       {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"}) {
    unsetenv(name);
  }
  CHECK(heap_of_rank() == "67108864 8388608\n");
  setenv("MALLOC_TRIM_THRESHOLD_", "1000", 1);
  CHECK(heap_of_rank() == "1000\n");
  unsetenv("MALLOC_TRIM_THRESHOLD_");
  setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=0", 1);
  CHECK(heap_of_rank() == "glibc.malloc.perturb=0\n");
  unsetenv("GLIBC_TUNABLES");
}

TEST_CASE("a rank that exits with 3 ends the others and is named") {
  const auto start = Clock::now();
  const LaunchResult result = launch(3, "if [ $RANK = 1 ]; then exit 3; fi; exec sleep 60");
  CHECK(result.exit_code == 3);
  CHECK_THAT(result.message, ContainsSubstring("rank 1 (pid ") &&
                                 ContainsSubstring("ended with exit code 3; stopping the other 2 rank(s)"));
  CHECK(Clock::now() - start < std::chrono::seconds(5));
}

// Each rank appends to its file: its number, the number of ranks, and how often they were started again.
constexpr const char* kReport = "echo $RANK of $WORLD_SIZE, restart $TORCHELASTIC_RESTART_COUNT; ";

TEST_CASE("ranks start again after one has failed, and the others end at once, also those that ignore SIGTERM") {
  const TempFolder folder;
  const auto start = Clock::now();
  const LaunchResult result = launch_ranks(
      {.nproc = 2,
       .max_restarts = 3,
       .argv = {"/bin/sh", "-c",
                std::string(kReport) + "trap '' TERM; if [ $TORCHELASTIC_RESTART_COUNT = 2 ]; then exit 0; fi; "
                                       "if [ $RANK = 1 ]; then kill -9 $$; fi; while :; do sleep 0.1; done"},
       .output_files = {folder.path("0"), folder.path("1")}});
  CHECK(result.exit_code == 0);
  CHECK(result.message.empty());
  CHECK(result.restarts == 2);
  CHECK(result.nproc == 2);
  CHECK(read_file(folder.path("0")) == "0 of 2, restart 0\n0 of 2, restart 1\n0 of 2, restart 2\n");
  CHECK(Clock::now() - start < std::chrono::seconds(2));
}

TEST_CASE("a failure is final once the restarts are used up, and at once where another start cannot help") {
  const auto launch_failing = [](const std::string& script) {
    return launch_ranks({.nproc = 2, .max_restarts = 2, .argv = {"/bin/sh", "-c", script}});
  };
  const LaunchResult used_up = launch_failing("exit $((3 * RANK))");
  CHECK(used_up.exit_code == 3);
  CHECK(used_up.restarts == 2);
  CHECK_THAT(used_up.message,
             ContainsSubstring("ended with exit code 3") && ContainsSubstring("all 2 restarts are used up"));
  for (const int code : {kUserErrorExitCode, 126, 127}) {
    const LaunchResult final = launch_failing("exit " + std::to_string(code));
    CHECK(final.exit_code == code);
    CHECK(final.restarts == 0);
    CHECK_THAT(final.message, ContainsSubstring("a restart would not help"));
  }
}

TEST_CASE("a rank that fails twice in a row at its start is left out, while min_ranks remain") {
  const auto launch_failing = [](int min_ranks, std::chrono::milliseconds start_time, const std::string& script) {
    return launch_ranks({.nproc = 3,
                         .max_restarts = 6,
                         .min_ranks = min_ranks,
                         .argv = {"/bin/sh", "-c", script},
                         .start_time = start_time});
  };
  const std::string last_fails = "if [ $RANK = 2 ]; then exit 3; fi; if [ $WORLD_SIZE = 3 ]; then sleep 5; fi";
  const LaunchResult fewer = launch_failing(2, std::chrono::minutes(1), last_fails);
  CHECK(fewer.exit_code == 0);
  CHECK(fewer.restarts == 2);
  CHECK(fewer.nproc == 2);
  CHECK(launch_failing(0, std::chrono::minutes(1), last_fails).nproc == 3);
  CHECK(launch_failing(2, std::chrono::milliseconds(0), last_fails).nproc == 3);
  const LaunchResult least = launch_failing(2, std::chrono::minutes(1), "if [ $RANK = 0 ]; then exit 3; fi; sleep 5");
  CHECK(least.exit_code == 3);
  CHECK(least.nproc == 2);
  // Others each time: it is no rank's own fault.
  const std::string takes_turns = "if [ $RANK = $((TORCHELASTIC_RESTART_COUNT % 3)) ]; then exit 3; fi; sleep 5";
  CHECK(launch_failing(1, std::chrono::minutes(1), takes_turns).nproc == 3);
}

TEST_CASE("SIGTERM to the launcher ends ranks that would start again") {
  const TempFolder folder;
  const pid_t launcher = fork();
  REQUIRE(launcher >= 0);
  if (launcher == 0) {
    const std::string script = "touch " + folder.path("ready") + "; exec sleep 60";
    _exit(launch_ranks({.nproc = 2, .max_restarts = 3, .argv = {"/bin/sh", "-c", script}}).exit_code);
  }
  for (int i = 0; i < 200 && !std::filesystem::exists(folder.path("ready")); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  kill(launcher, SIGTERM);
  int status = 0;
  waitpid(launcher, &status, 0);
  CHECK(WEXITSTATUS(status) == 128 + SIGTERM);
}

TEST_CASE("the number of restarts is read from torchrun's variable") {
  unsetenv("TORCHELASTIC_RESTART_COUNT");
  CHECK(restart_count() == 0);
  setenv("TORCHELASTIC_RESTART_COUNT", "12", 1);
  CHECK(restart_count() == 12);
  setenv("TORCHELASTIC_RESTART_COUNT", "-1", 1);
  CHECK_THROWS_AS(restart_count(), ValueError);
  unsetenv("TORCHELASTIC_RESTART_COUNT");
}

TEST_CASE("a rank's end is seen where SIGCHLD is ignored, which it is again afterwards") {
  struct sigaction ignored = {}, before = {}, after = {};
  ignored.sa_handler = SIG_IGN;
  sigaction(SIGCHLD, &ignored, &before);
  const LaunchResult result = launch(2, "exit $((3 * RANK))");
  sigaction(SIGCHLD, &before, &after);
  CHECK(result.exit_code == 3);
  CHECK_THAT(result.message, ContainsSubstring("rank 1 (pid ") && ContainsSubstring("ended with exit code 3"));
  CHECK(after.sa_handler == SIG_IGN);
}

TEST_CASE("a rank that somebody else waits for has failed") {
  const TempFolder folder;
  std::thread other([&] {
    for (int i = 0; i < 200 && !std::filesystem::exists(folder.path("started")); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    struct sigaction reaping = {};
    reaping.sa_flags = SA_NOCLDWAIT;  // as if this thread waited for every child
    sigaction(SIGCHLD, &reaping, nullptr);
    std::ofstream(folder.path("go")) << "go";
  });
  const LaunchResult result =
      launch(1, "touch " + folder.path("started") + "; while [ ! -e " + folder.path("go") + " ]; do sleep 0.02; done");
  other.join();
  CHECK(result.exit_code == 1);
  CHECK_THAT(result.message, ContainsSubstring("rank 0 (pid ") && ContainsSubstring("ended with unknown status"));
}

TEST_CASE("a rank that is killed ends the others, also those that ignore SIGTERM, within 5 s") {
  const auto start = Clock::now();
  const LaunchResult result =
      launch(3, "trap '' TERM; if [ $RANK = 0 ]; then sleep 0.3; kill -9 $$; fi; while :; do sleep 0.1; done");
  CHECK(result.exit_code == 128 + SIGKILL);
  CHECK_THAT(result.message, ContainsSubstring("rank 0 (pid ") && ContainsSubstring("was killed by signal 9"));
  CHECK(Clock::now() - start < std::chrono::seconds(5));
}

TEST_CASE("ranks share a folder in memory over restarts, which ends with the launch") {
  const TempFolder memory, folder;
  const auto launch_with_memory = [&](const std::string& script) {
    return launch_ranks({.nproc = 2,
                         .max_restarts = 1,
                         .argv = {"/bin/sh", "-c", script},
                         .environment = {{"TESSERA_MEMORY_DIR", memory.path()}}});
  };
  const LaunchResult result = launch_with_memory(
      "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then cat $TESSERA_MEMORY_DIR/* >" + folder.path("$RANK") +
      "; exit; fi; " +
      "echo $RANK >$TESSERA_MEMORY_DIR/$RANK; until [ -s $TESSERA_MEMORY_DIR/0 -a -s $TESSERA_MEMORY_DIR/1 ]; do "
      "sleep 0.01; done; exit 3");
  CHECK(result.exit_code == 0);
  CHECK(result.restarts == 1);
  CHECK(read_file(folder.path("0")) == "0\n1\n");
  CHECK(read_file(folder.path("1")) == "0\n1\n");
  CHECK(launch_with_memory("exit 3").exit_code == 3);
  CHECK(std::filesystem::is_empty(memory.path()));
}

TEST_CASE("what a launcher that was killed left in memory ends with the next launch, and no other one's") {
  const TempFolder memory, folder;
  const LaunchOptions options{.nproc = 1,
                              .argv = {"/bin/sh", "-c",
                                       "echo $TESSERA_MEMORY_DIR >" + folder.path("new") + "; mv " +
                                           folder.path("new") + " " + folder.path("ready") + "; exec sleep 60"},
                              .environment = {{"TESSERA_MEMORY_DIR", memory.path()}}};
  LaunchOptions next = options;
  next.argv = {"/bin/sh", "-c", "exit"};
  const pid_t launcher = fork();
  REQUIRE(launcher >= 0);
  if (launcher == 0) {
    _exit(launch_ranks(options).exit_code);
  }
  for (int i = 0; i < 200 && !std::filesystem::exists(folder.path("ready")); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  std::string left = read_file(folder.path("ready"));
  REQUIRE(left.starts_with(memory.path() + "/"));
  left.pop_back();
  std::ofstream(left + "/state") << "x";
  CHECK(launch_ranks(next).exit_code == 0);
  CHECK(std::filesystem::exists(left + "/state"));
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  CHECK(launch_ranks(next).exit_code == 0);
  CHECK(std::filesystem::is_empty(memory.path()));
}

TEST_CASE("SIGTERM to the launcher goes to the ranks") {
  const TempFolder folder;
  const pid_t launcher = fork();
  REQUIRE(launcher >= 0);
  if (launcher == 0) {
    const std::string script = "trap 'echo term > " + folder.path("$RANK") + "; exit 0' TERM; touch " +
                               folder.path("ready$RANK") + "; while :; do sleep 0.05; done";
    _exit(launch(2, script).exit_code);
  }
  const auto ready = [&] {
    return std::filesystem::exists(folder.path("ready0")) && std::filesystem::exists(folder.path("ready1"));
  };
  for (int i = 0; i < 200 && !ready(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  kill(launcher, SIGTERM);
  int status = 0;
  waitpid(launcher, &status, 0);
  CHECK(WEXITSTATUS(status) == 128 + SIGTERM);
  CHECK(read_file(folder.path("0")) == "term\n");
  CHECK(read_file(folder.path("1")) == "term\n");
}

TEST_CASE("ranks end with a launcher that is killed") {
  const TempFolder folder;
  const pid_t launcher = fork();
  REQUIRE(launcher >= 0);
  if (launcher == 0) {
    _exit(launch(2, "echo $$ > " + folder.path("pid$RANK.new") + "; mv " + folder.path("pid$RANK.new") + " " +
                        folder.path("pid$RANK") + "; exec sleep 60")
              .exit_code);
  }
  const auto started = [&] {
    return !read_file(folder.path("pid0")).empty() && !read_file(folder.path("pid1")).empty();
  };
  for (int i = 0; i < 200 && !started(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  REQUIRE(started());
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  // An orphan that nobody reaps stays as a zombie: that counts as ended.
  const auto runs = [&](const std::string& file) {
    std::ifstream status("/proc/" + std::to_string(std::stoi(read_file(folder.path(file)))) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("State:")) {
        return line.find('Z') == std::string::npos;
      }
    }
    return false;
  };
  for (int i = 0; i < 100 && (runs("pid0") || runs("pid1")); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  CHECK_FALSE(runs("pid0"));
  CHECK_FALSE(runs("pid1"));
}

TEST_CASE("where stdout is closed, it stays so in the ranks, and is not the socket where they meet") {
  const pid_t launcher = fork();
  REQUIRE(launcher >= 0);
  if (launcher == 0) {
    close(STDOUT_FILENO);
    _exit(launch(1, "if [ -e /proc/$$/fd/1 ]; then exit 5; fi").exit_code);
  }
  int status = 0;
  waitpid(launcher, &status, 0);
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("an error of libtorch is one line with the rank, without stack frames, and exit code 1") {
  const TempFolder folder;
  const auto run = [&](const std::function<void()>& program) {
    const pid_t child = fork();
    if (child == 0) {
      const int file = open(folder.path("err").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
      dup2(file, STDERR_FILENO);
      setenv("RANK", "3", 1);
      _exit(report_errors(program));
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  };
  CHECK(run([] { TORCH_CHECK_VALUE(false, "this line matters"); }) == 1);
  CHECK(read_file(folder.path("err")) == "rank 3: this line matters\n");
  CHECK(run([] { throw CommError("so does this one"); }) == 1);
  CHECK(read_file(folder.path("err")) == "rank 3: so does this one\n");
  CHECK(run([] { throw ValueError("a user's"); }) == kUserErrorExitCode);
  CHECK(run([] {}) == 0);
  CHECK(read_file(folder.path("err")).empty());
}

TEST_CASE("what cannot be started") {
  CHECK_THROWS_AS(launch_ranks({.nproc = 0}), ValueError);
  CHECK_THROWS_AS(launch(2, "true", {"one file"}), ValueError);
  CHECK_THROWS_AS(launch_ranks({.nproc = 2, .max_restarts = -1}), ValueError);
  CHECK_THROWS_AS(launch_ranks({.nproc = 2, .min_ranks = 3}), ValueError);
  CHECK(launch_ranks({.nproc = 1, .argv = {"/no/such/program"}}).exit_code == 127);
  CHECK(launch(1, "true", {"/no/such/folder/file"}).exit_code == 126);
  CHECK(launch_local({.nproc = 2, .argv = {"/bin/true"}}) == 0);
  CHECK_FALSE(launched_as_rank());
}

}  // namespace
}  // namespace tessera
