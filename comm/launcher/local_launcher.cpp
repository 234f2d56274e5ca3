#include "comm/launcher/local_launcher.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/open_files.h"
#include "base/report.h"
#include "comm/context/flight_record.h"
#include "comm/launch/job_secret.h"
#include "comm/launch/listen_socket.h"
#include "comm/launch/rank_environment.h"
#include "comm/launch/regroup.h"
#include "comm/launcher/flight_report.h"
#include "comm/launcher/memory_folder.h"
#include "comm/launcher/rank_heap.h"
#include "comm/launcher/rank_processes.h"

extern char** environ;  // NOLINT: POSIX's name

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kGrace = std::chrono::seconds(3);  // from SIGTERM to SIGKILL
constexpr const char* kAddress = "127.0.0.1";     // address of the rendezvous
constexpr int kForwarded[] = {SIGINT, SIGTERM};

/// Listening socket on a free loopback port, which rank 0 inherits, so that no other program takes the port in between.
class ListenSocket {
 public:
  ListenSocket() : descriptor_(above_standard(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    const int on = 1;
    setsockopt(descriptor_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const bool listening = descriptor_ >= 0 && bind(descriptor_, generic, length) == 0 &&
                           listen(descriptor_, SOMAXCONN) == 0 && getsockname(descriptor_, generic, &length) == 0;
    TESSERA_CHECK(Error, listening, "launch_local: no port on 127.0.0.1 for the ranks to meet: {}",
                  std::strerror(errno));
    port_ = ntohs(address.sin_port);
  }
  ~ListenSocket() { release(); }
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  int descriptor() const { return descriptor_; }
  int port() const { return port_; }
  void release() {
    if (descriptor_ >= 0) {
      close(descriptor_);
      descriptor_ = -1;
    }
  }

 private:
  int descriptor_;
  int port_ = 0;
};

/// Blocks the signals that the launcher receives with sigtimedwait. Also resets an ignored SIGCHLD, which a program may
/// inherit from its parent, because the kernel would then not keep the exit status of ranks.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&set_);
    for (int signal : kForwarded) {
      sigaddset(&set_, signal);
    }
    sigaddset(&set_, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &set_, &previous_);
    struct sigaction by_default = {};
    by_default.sa_handler = SIG_DFL;
    sigaction(SIGCHLD, &by_default, &previous_child_action_);
  }
  ~BlockedSignals() {
    sigaction(SIGCHLD, &previous_child_action_, nullptr);
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  /// Returns the next signal, or 0 after `limit`.
  int wait(std::chrono::milliseconds limit) const {
    const timespec time = {limit.count() / 1000, (limit.count() % 1000) * 1000000};
    return std::max(0, sigtimedwait(&set_, nullptr, &time));
  }
  const sigset_t& previous() const { return previous_; }

 private:
  sigset_t set_;
  sigset_t previous_;
  struct sigaction previous_child_action_ = {};
};

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  result.reserve(texts.size() + 1);
  for (std::string& text : texts) {
    result.push_back(text.data());
  }
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) {
    arguments.push_back(argument);
  }
  return arguments;
}

/// Keeps variables that the user set.
void keep_heap(std::map<std::string, std::string>& variables) {
  constexpr const char* kTuning[] = {"GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
                                     "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_"};
  const bool is_tuned =
      std::any_of(std::begin(kTuning), std::end(kTuning), [&](const char* name) { return variables.contains(name); });
  if (!is_tuned) {
    variables.insert(kRankHeap.begin(), kRankHeap.end());
  }
}

/// Returns an identity that is unique across launches and hosts.
std::string new_job_identity() {
  std::random_device random;
  return fmt::format("local {}-{:08x}{:08x}", getpid(), random(), random());
}

/// Variables of a job that all ranks of one launch share.
struct LaunchedJob {
  std::string identity = new_job_identity();
  std::string secret = new_job_secret();
};

/// Returns the value that the user adds for ranks, or `otherwise`.
std::string added_variable(const LaunchOptions& options, const std::string& name, std::string otherwise) {
  for (const auto& [own_name, own] : options.environment) {
    otherwise = own_name == name ? own : otherwise;
  }
  return otherwise;
}

/// Returns the value that ranks of a launch inherit unless the launcher sets the variable, or "".
std::string given_variable(const LaunchOptions& options, const std::string& name) {
  return added_variable(options, name, process_variable(name).value_or(""));
}

/// Opens the launcher's store, if it keeps survivors.
std::optional<RegroupStore> open_regroup_store(const LaunchOptions& options, const ListenSocket& socket,
                                               const LaunchedJob& job) {
  if (!options.keep_survivors) {
    return std::nullopt;
  }
  const std::string secret = process_variable(kSecretVariable).value_or(job.secret);
  return RegroupStore({.address = kAddress,
                       .port = socket.port(),
                       .listen_socket = fcntl(socket.descriptor(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1),
                       .job = added_variable(options, kJobVariable, job.identity),
                       .secret = added_variable(options, kSecretVariable, secret)});
}

/// Rendezvous of ranks.
struct Meeting {
  explicit Meeting(const LaunchOptions& options)
      : flights(given_variable(options, kFlightVariable)), regroup(open_regroup_store(options, socket, job)) {}

  ListenSocket socket = {};
  LaunchedJob job = {};
  FlightFolder flights;
  std::optional<RegroupStore> regroup;

  bool serves(int rank) const { return rank == 0 && !regroup; }  // whether the rank serves the store on the socket
};

std::vector<std::string> rank_variables(const LaunchOptions& options, const Seat& seat, const Meeting& meeting,
                                        const std::string& memory_folder) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    variables[text.substr(0, equals)] = equals == std::string::npos ? "" : text.substr(equals + 1);
  }
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  variables.try_emplace("OMP_NUM_THREADS", std::to_string(std::max(1u, cores / seat.ranks)));
  keep_heap(variables);
  variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(seat.rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(seat.ranks);
  variables["MASTER_ADDR"] = kAddress;
  variables["MASTER_PORT"] = std::to_string(meeting.socket.port());
  variables[kRestartVariable] = std::to_string(seat.start);
  variables[kJobVariable] = meeting.job.identity;
  variables.try_emplace(kSecretVariable, meeting.job.secret);
  variables.erase(kRegroupVariable);
  if (meeting.regroup) {
    variables[kRegroupVariable] = "1";
  }
  variables.erase(kListenSocketVariable);
  if (meeting.serves(seat.rank)) {
    variables[kListenSocketVariable] = std::to_string(meeting.socket.descriptor());
  }
  for (const auto& [name, value] : options.environment) {
    variables[name] = value;
  }
  variables[kFlightVariable] = meeting.flights.path();
  variables[kMemoryVariable] = memory_folder;
  std::vector<std::string> result;
  result.reserve(variables.size());
  for (const auto& [name, value] : variables) {
    result.push_back(fmt::format("{}={}", name, value));
  }
  return result;
}

/// Returns whether a restart would not help.
bool is_final(const StartEnd& end) {
  return end.exit_code == 0 || end.is_stopped || end.exit_code == kUserErrorExitCode ||
         end.exit_code == kCannotRunExitCode || end.exit_code == kNotFoundExitCode;
}

/// Decides how many ranks restart after a failed start.
class RankCount {
 public:
  explicit RankCount(const LaunchOptions& options)
      : least_(options.min_ranks == 0 ? options.nproc : options.min_ranks), start_time_(options.start_time) {}

  int after_failure(int ranks, int failed_rank, Clock::duration lived) {
    const int failed_at_start = lived < start_time_ ? failed_rank : -1;
    const bool is_second = failed_at_start >= 0 && failed_at_start == last_failed_at_start_;
    const bool leaves_one = is_second && ranks > least_;
    last_failed_at_start_ = leaves_one ? -1 : failed_at_start;
    return leaves_one ? ranks - 1 : ranks;
  }

 private:
  int least_;
  std::chrono::milliseconds start_time_;
  int last_failed_at_start_ = -1;
};

void check_options(const LaunchOptions& options) {
  TESSERA_CHECK(ValueError, options.nproc >= 1, "launch_local: nproc {}; it must be at least 1", options.nproc);
  TESSERA_CHECK(ValueError, options.max_restarts >= 0, "launch_local: max_restarts {}; it must not be negative",
                options.max_restarts);
  TESSERA_CHECK(ValueError, options.min_ranks >= 0 && options.min_ranks <= options.nproc,
                "launch_local: min_ranks {}; it must be 1 to nproc, {}, or 0 for nproc", options.min_ranks,
                options.nproc);
  TESSERA_CHECK(ValueError, !options.keep_survivors || options.max_restarts > 0,
                "launch_local: keep_survivors: goes with max_restarts, at least 1");
  TESSERA_CHECK(ValueError, options.output_files.empty() || std::ssize(options.output_files) == options.nproc,
                "launch_local: {} output files for {} ranks", options.output_files.size(), options.nproc);
  parse_job_secret(process_variable);  // an invalid one is rejected here instead of in each rank
}

std::string describe_last(const StartEnd& end, int restart, const LaunchOptions& options) {
  std::string text = end.failure;
  if (end.others > 0) {
    text += fmt::format("; stopping the other {} rank(s)", end.others);
  }
  if (options.max_restarts > 0 && end.exit_code != 0 && !end.is_stopped) {
    text += restart == options.max_restarts ? fmt::format("; all {} restarts are used up", restart)
                                            : "; a restart would not help";
  }
  return text;
}

/// One launch, with all of its starts.
class Launch {
 public:
  explicit Launch(const LaunchOptions& options)
      : options_(options), memory_(given_variable(options, kMemoryVariable)), nproc_(options.nproc), count_(options) {}

  LaunchResult run() {
    for (int start = 0;; ++start) {
      if (!meeting_ || !options_.keep_survivors) {
        meeting_.emplace(options_);
      }
      start_missing(start);
      const StartEnd end = watch(start);
      if (is_final(end) || start == options_.max_restarts) {
        return {.exit_code = end.exit_code,
                .flights = end.flights,
                .message = describe_last(end, start, options_),
                .restarts = start,
                .nproc = nproc_};
      }
      nproc_ = ranks_after(end);
      report_failure("launch_local: {}; restart {} of {} with {} rank(s){}", end.failure, start + 1,
                     options_.max_restarts, nproc_, options_.keep_survivors ? ", the others stay" : "");
      std::fputs(end.flights.c_str(), stderr);
      ranks_after_.reset();
      if (meeting_->regroup) {
        ranks_.reseat(*meeting_->regroup, {.start = start + 1, .ranks = nproc_});
      }
    }
  }

 private:
  /// Starts a process for each rank that has none.
  void start_missing(int start) {
    std::vector<std::string> arguments = options_.argv.empty() ? own_arguments() : options_.argv;
    const std::string path = options_.argv.empty() ? "/proc/self/exe" : options_.argv[0];
    const std::vector<char*> argv = pointers(arguments);
    const pid_t launcher = getpid();
    for (int rank = 0; rank < nproc_; ++rank) {
      if (ranks_.has(rank)) {
        continue;
      }
      const Seat seat{.start = start, .rank = rank, .ranks = nproc_};
      std::vector<std::string> variables = rank_variables(options_, seat, *meeting_, memory_.path());
      const std::vector<char*> environment = pointers(variables);
      ranks_.start(seat, {.path = path.c_str(),
                          .argv = const_cast<char**>(argv.data()),
                          .environment = const_cast<char**>(environment.data()),
                          .output_file = options_.output_files.empty() ? nullptr : options_.output_files[rank].c_str(),
                          .appends = start > 0,
                          .listen_descriptor = meeting_->serves(rank) ? meeting_->socket.descriptor() : -1,
                          .signals = &signals_.previous(),
                          .launcher = launcher});
    }
    meeting_->socket.release();
  }

  /// Waits until all ranks have ended or, after a failure, survivors have left their groups.
  StartEnd watch(int start) {
    StartEnd end;
    std::optional<Clock::time_point> kill_at;
    bool regroups = false;
    std::chrono::milliseconds pause(0);
    while (!ranks_.empty() && !(regroups && ranks_.all_left(start))) {
      const int signal = signals_.wait(pause);
      if (signal == SIGINT || signal == SIGTERM) {
        ranks_.send(signal);
        end = {.exit_code = 128 + signal,
               .failure = fmt::format("stopped by signal {} ({})", signal, strsignal(signal)),
               .is_stopped = true};
        kill_at = kill_at.value_or(Clock::now() + options_.stop_grace);
        regroups = false;
      }
      // Ranks that already wait in the next start count as its failures.
      ranks_.reap(end, regroups ? start : start + 1, /*prefers_signals=*/!kill_at || regroups);
      if (meeting_->regroup) {
        ranks_.find_left(*meeting_->regroup, start, end);
      }
      const bool starts_again = start < options_.max_restarts && !is_final(end);
      if (end.exit_code != 0 && !kill_at) {
        regroups = starts_again && options_.keep_survivors;
        kill_at = Clock::now() + begin_end(start, end, starts_again);
      } else if (kill_at && Clock::now() >= *kill_at) {
        regroups ? ranks_.kill_late(end, start) : ranks_.send(SIGKILL);
      }
      if (regroups && end.failed_rank >= 0 && ranks_after(end) == nproc_) {
        start_missing(start + 1);  // while the others leave their groups
      }
      pause = std::chrono::milliseconds(regroups ? 5 : meeting_->regroup ? 50 : 200);
    }
    return end;
  }

  /// Notifies ranks that a start has failed. Returns the time that they have.
  std::chrono::milliseconds begin_end(int start, StartEnd& end, bool starts_again) {
    if (starts_again && options_.keep_survivors) {
      meeting_->regroup->end_start(start, end.failure);
      end.flights = meeting_->flights.report(end.failure, nproc_);
      return options_.regroup_timeout;
    }
    // The system may still be freeing the memory of a killed rank when others fail because of it.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ranks_.reap(end, start, /*prefers_signals=*/true);
    end.flights = meeting_->flights.report(end.failure, nproc_);
    // Ranks that will restart need no orderly end, because their state is in checkpoints.
    ranks_.send(starts_again && !is_final(end) ? SIGKILL : SIGTERM);
    return kGrace;
  }

  int ranks_after(const StartEnd& end) {
    if (!ranks_after_) {
      ranks_after_ = count_.after_failure(nproc_, end.failed_rank, end.lived);
    }
    return *ranks_after_;
  }

  const LaunchOptions& options_;
  const BlockedSignals signals_ = {};
  const MemoryFolder memory_;  // for all starts
  std::optional<Meeting> meeting_;
  int nproc_;
  RankCount count_;
  std::optional<int> ranks_after_;  // number of ranks after a failure, once decided
  RankProcesses ranks_;
};

}  // namespace

LaunchResult launch_ranks(const LaunchOptions& options) {
  check_options(options);
  return Launch(options).run();
}

int launch_local(const LaunchOptions& options) {
  const LaunchResult result = launch_ranks(options);
  if (!result.message.empty()) {
    std::fprintf(stderr, "launch_local: %s\n%s", result.message.c_str(), result.flights.c_str());
  }
  return result.exit_code;
}

bool launched_as_rank() {
  return is_launched(process_variable);
}

int restart_count() {
  const std::string text = process_variable(kRestartVariable).value_or("0");
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  TESSERA_CHECK(ValueError, error == std::errc() && end == text.data() + text.size() && count >= 0,
                "environment variable {}=\"{}\" is not a number; a whole number from 0 on is needed", kRestartVariable,
                text);
  return count;
}

std::string job_memory_folder() {
  return process_variable(kMemoryVariable).value_or("");
}

int error_exit_code(const std::exception& error) {
  const bool is_users =
      dynamic_cast<const ValueError*>(&error) != nullptr || dynamic_cast<const KeyError*>(&error) != nullptr ||
      dynamic_cast<const NotImplementedError*>(&error) != nullptr || dynamic_cast<const StateError*>(&error) != nullptr;
  return is_users ? kUserErrorExitCode : 1;
}

int report_errors(const std::function<void()>& program) {
  try {
    program();
    return 0;
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    const char* rank = std::getenv("RANK");
    report_failure("{}{}", rank == nullptr ? "" : fmt::format("rank {}: ", rank),
                   torch_error ? torch_error->what_without_backtrace() : error.what());
    return error_exit_code(error);
  }
}

}  // namespace tessera
