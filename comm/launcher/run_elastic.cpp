#include "comm/launcher/run_elastic.h"

#include <c10/util/Exception.h>
#include <stdlib.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/report.h"
#include "comm/context/rank_state.h"
#include "comm/launch/job_secret.h"
#include "comm/launch/job_store.h"
#include "comm/launch/rank_environment.h"
#include "comm/launch/regroup.h"
#include "comm/launch/store.h"
#include "comm/launcher/local_launcher.h"

namespace tessera {

namespace {

/// Destroys the rank's groups while the exception that ends a start propagates: groups then do not wait for peers.
class StartScope {
 public:
  StartScope() = default;
  StartScope(const StartScope&) = delete;
  StartScope& operator=(const StartScope&) = delete;
  ~StartScope() {
    if (std::uncaught_exceptions() > exceptions_before_) {
      detail::renew_process_state();
      forget_stores();
    }
  }

 private:
  const int exceptions_before_ = std::uncaught_exceptions();
};

/// Returns the error that a lost rank caused, or nothing if `train` returned.
std::optional<std::string> train_once(const std::function<void()>& train) {
  try {
    const StartScope scope;
    train();
    return std::nullopt;
  } catch (const CommError& error) {
    return error.what();
  } catch (const c10::DistError& error) {
    return error.what_without_backtrace();
  }
}

std::shared_ptr<RegroupStore> connect_to_launcher(const RankEnvironment& ranks) {
  return std::make_shared<RegroupStore>(RegroupStoreOptions{.address = ranks.master_addr,
                                                            .port = ranks.master_port,
                                                            .job = parse_job_identity(process_variable),
                                                            .secret = parse_job_secret(process_variable)});
}

/// Sets the variables that the launcher would set for a new process.
void set_environment(const Seat& seat) {
  const auto set = [](const char* name, int value) { setenv(name, std::to_string(value).c_str(), 1); };
  set("RANK", seat.rank);
  set("LOCAL_RANK", seat.rank);
  set("WORLD_SIZE", seat.ranks);
  set("LOCAL_WORLD_SIZE", seat.ranks);
  set(kRestartVariable, seat.start);
}

}  // namespace

bool keeps_survivors() {
  return process_variable(kRegroupVariable) == "1";
}

void run_elastic(const std::function<void()>& train) {
  if (!keeps_survivors()) {
    train();
    return;
  }
  const RankEnvironment ranks = rank_environment();
  const auto store = connect_to_launcher(ranks);
  Seat seat{.start = restart_count(), .rank = ranks.rank, .ranks = ranks.world_size};
  while (true) {
    set_wait_fault([store, start = seat.start] { return store->find_over(start); });
    const auto error = train_once(train);
    set_wait_fault({});
    if (!error) {
      return;
    }
    report_failure("rank {}: {}; the process stays, and waits for the launcher", seat.rank, *error);
    store->leave(seat, *error);
    seat = store->await_next(seat);
    set_environment(seat);
  }
}

}  // namespace tessera
