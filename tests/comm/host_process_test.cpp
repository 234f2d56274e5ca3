#include "comm/launch/host_process.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

TEST_CASE("a process is told from one that had its number before, and from none") {
  HostProcess process = this_process();
  CHECK(process.pid == getpid());
  CHECK_FALSE(process.host.empty());
  CHECK(is_running(process));
  process.start_time += 1;
  CHECK_FALSE(is_running(process));
  const std::vector<HostProcess> processes = {{.host = "a"}, {.host = "a"}, {.host = "b"}, {.host = ""}, {.host = ""}};
  CHECK(share_host(processes, {0, 1}));
  CHECK_FALSE(share_host(processes, {1, 2}));
  CHECK_FALSE(share_host(processes, {3, 4}));
}

/// While it lives this process can open no file.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none = {.rlim_cur = 0, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoMoreFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoMoreFiles(const NoMoreFiles&) = delete;
  NoMoreFiles& operator=(const NoMoreFiles&) = delete;

 private:
  rlimit before_;
};

TEST_CASE("a process that runs is not taken for dead where no file can be opened, and one that is gone is") {
  const pid_t child = fork();
  if (child == 0) {
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  const HostProcess own = this_process();
  bool runs = false, child_runs = true;
  {
    const NoMoreFiles limit;
    runs = is_running(own);
    child_runs = is_running({.pid = child});
  }
  CHECK(runs);
  CHECK_FALSE(child_runs);
  CHECK(is_running(own));
  CHECK_FALSE(is_running({.pid = child}));
}

}  // namespace
}  // namespace tessera
