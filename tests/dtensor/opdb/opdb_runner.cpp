#include "tests/dtensor/opdb/opdb_runner.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

#include "base/error.h"

namespace tessera {

namespace {

constexpr int kRunTimeoutMs = 60'000;

struct Run {
  const OpdbCase* test;
  Assignment assignment;
};

std::vector<Run> runs_of(const std::vector<OpdbCase>& cases, const std::vector<int64_t>& mesh, int draws) {
  TESSERA_CHECK(ValueError, draws > 0 || mesh.size() == 1, "opdb: assignments on {} axes are drawn: say how many",
                mesh.size());
  std::vector<Run> runs;
  for (const auto& test : cases) {
    for (auto& assignment : draws > 0 ? drawn_assignments(test, mesh, draws) : assignments(test)) {
      runs.push_back({&test, std::move(assignment)});
    }
  }
  return runs;
}

/// A run on one line: the outcome as a number, the worst part, the elements by their bounds' sources, the reason, '\n'.
std::string to_line(const OpdbRun& run) {
  const auto& [outcome, reason, worst_part] = run.judgement;
  return fmt::format("{} {} {} {}\n", static_cast<int>(outcome), worst_part, fmt::join(run.elements, " "),
                     reason.substr(0, reason.find('\n')));
}

OpdbRun from_line(const std::string& line) {
  std::istringstream in(line);
  int outcome = 0;
  OpdbRun run;
  in >> outcome >> run.judgement.worst_part;
  for (auto& count : run.elements) {
    in >> count;
  }
  TESSERA_CHECK(Error, in.good(), "opdb: no run: {}", line);
  in.get();
  std::getline(in, run.judgement.reason);
  run.judgement.outcome = static_cast<Outcome>(outcome);
  return run;
}

/// Why nothing more can be asked of a GPU in this process. Its errors come late, and every call fails from then on, as
/// a case may that is to fail.
std::string failure_of(c10::DeviceType device) {
  try {
    return device == c10::kCPU || at::zeros({1}, at::TensorOptions(device)).item<float>() == 0 ? "" : "zeros are none";
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

[[noreturn]] void run_child(int out, const std::vector<Run>& runs, size_t first, const OpdbRanks& ranks) {
  // libtorch replaces its thread pool at the first use after a fork, not safely if two ranks' threads are that first
  // use.
  at::set_num_threads(1);
  at::globalContext().setAllowTF32CuDNN(false);  // by which whole and cut convolutions differ visibly
  ExpectedCall expected;
  for (size_t i = first; i < runs.size(); ++i) {
    const auto& test = *runs[i].test;
    const auto op = c10::Dispatcher::singleton().findSchema(test.op);
    if (op && (i == first || runs[i - 1].test != &test)) {
      expected = expected_call(test, *op, ranks.device, ranks.expects_recorded);
    }
    OpdbRun run{.elements = expected.elements};
    run.judgement = op ? judge(test, *op, expected, runs[i].assignment, ranks)
                       : Judgement{Outcome::Unsupported, "this libtorch has no such op"};
    const auto failure = failure_of(ranks.device);
    if (!failure.empty()) {
      fmt::print(stderr, "{} {}: {}\n", runs[i].test->id, runs[i].assignment.label, failure);
      _exit(1);  // a crash of this run; another process goes on with the next
    }
    const auto line = to_line(run);
    if (write(out, line.data(), line.size()) < 0) {
      break;
    }
  }
  _exit(0);
}

/// Lines that a child writes, until it ends or a run takes too long.
class Child {
 public:
  Child(const std::vector<Run>& runs, size_t first, const OpdbRanks& ranks) {
    int ends[2];
    TESSERA_CHECK(Error, pipe(ends) == 0, "opdb: no pipe: errno {}", errno);
    pid_ = fork();
    TESSERA_CHECK(Error, pid_ >= 0, "opdb: no process: errno {}", errno);
    if (pid_ == 0) {
      close(ends[0]);
      run_child(ends[1], runs, first, ranks);
    }
    close(ends[1]);
    in_ = ends[0];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    close(in_);
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  /// False at the end of the output, or if nothing came in time: then `timed_out`.
  bool next_line(std::string& line) {
    for (;;) {
      const auto end = buffer_.find('\n');
      if (end != std::string::npos) {
        line = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return true;
      }
      pollfd waiting{.fd = in_, .events = POLLIN, .revents = 0};
      timed_out = poll(&waiting, 1, kRunTimeoutMs) == 0;
      char bytes[4096];
      const auto count = timed_out ? 0 : read(in_, bytes, sizeof bytes);
      if (count <= 0) {
        return false;
      }
      buffer_.append(bytes, static_cast<size_t>(count));
    }
  }

  bool timed_out = false;

 private:
  pid_t pid_ = -1;
  int in_ = -1;
  std::string buffer_;
};

}  // namespace

size_t OverloadResult::count(Outcome outcome) const {
  return static_cast<size_t>(
      std::count_if(runs.begin(), runs.end(), [&](const OpdbRun& run) { return run.judgement.outcome == outcome; }));
}

bool OverloadResult::is_wrong() const {
  return count(Outcome::Wrong) + count(Outcome::Diverge) + count(Outcome::Crash) > 0;
}

std::vector<OpdbRun> run_cases(const std::vector<OpdbCase>& cases, const OpdbRanks& ranks, int draws) {
  const auto runs = runs_of(cases, ranks.mesh, draws);
  std::vector<OpdbRun> done;
  const auto add = [&](OpdbRun run) {
    const auto& [test, assignment] = runs[done.size()];
    run.label = test->id + " " + assignment.label;
    done.push_back(std::move(run));
  };
  while (done.size() < runs.size()) {
    Child child(runs, done.size(), ranks);
    for (std::string line; done.size() < runs.size() && child.next_line(line);) {
      add(from_line(line));
    }
    if (done.size() < runs.size()) {
      add({.judgement = child.timed_out ? Judgement{Outcome::Diverge, "no end after a minute"}
                                        : Judgement{Outcome::Crash, "the process died"}});
    }
  }
  return done;
}

}  // namespace tessera
