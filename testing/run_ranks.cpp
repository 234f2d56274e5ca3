#include "testing/run_ranks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/AutogradState.h>
#include <c10/util/Exception.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "comm/process_group.h"
#include "comm/threads/thread_world.h"
#include "testing/expect.h"

namespace tessera {

namespace {

/// Keeps the first failure. Later ones, which may follow from it on other ranks, are dropped.
class FirstFailure {
 public:
  void record(int rank, std::exception_ptr failure) {
    std::lock_guard lock(mutex_);
    if (!failure_) {
      rank_ = rank;
      failure_ = std::move(failure);
    }
  }

  void rethrow_if_any() const {
    if (failure_) {
      rethrow();
    }
  }

 private:
  template <typename Type>
  [[noreturn]] void rethrow_as(const std::exception& failure) const {
    throw Type(fmt::format("rank {}: {}", rank_, failure.what()));
  }

  [[noreturn]] void rethrow() const {
    try {
      std::rethrow_exception(failure_);
    } catch (const ExpectationError& failure) {
      rethrow_as<ExpectationError>(failure);
    } catch (const ValueError& failure) {
      rethrow_as<ValueError>(failure);
    } catch (const KeyError& failure) {
      rethrow_as<KeyError>(failure);
    } catch (const NotImplementedError& failure) {
      rethrow_as<NotImplementedError>(failure);
    } catch (const StateError& failure) {
      rethrow_as<StateError>(failure);
    } catch (const CommError& failure) {
      rethrow_as<CommError>(failure);
    } catch (const AssertionError& failure) {
      rethrow_as<AssertionError>(failure);
    } catch (const c10::Error& failure) {  // without libtorch's stack frames
      throw Error(fmt::format("rank {}: {}", rank_, failure.what_without_backtrace()));
    } catch (const std::exception& failure) {
      rethrow_as<Error>(failure);
    } catch (...) {
      throw Error(fmt::format("rank {}: an exception that is no std::exception", rank_));
    }
  }

  std::mutex mutex_;
  int rank_ = 0;
  std::exception_ptr failure_;
};

/// Autograd runs CUDA nodes in one thread per device of the process. All ranks would share it: a node that waits for a
/// peer would wait forever, and the thread belongs to no rank (comm/context/rank_context.h). Source: PyTorch's
/// MultiThreadedTestCase.
void run_backward_in_this_thread() {
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
}

std::string failure_text(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void run_ranks(int world_size, const std::function<void(int rank)>& body, RunRanksOptions options) {
  TESSERA_CHECK(ValueError, world_size >= 1, "run_ranks: world_size {}; it must be at least 1", world_size);
  const auto world = std::make_shared<ThreadWorld>(world_size);
  FirstFailure first_failure;
  const auto run_rank = [&](int rank) {
    RankContextGuard guard(RankContext::create());
    run_backward_in_this_thread();
    try {
      init_process_group({.backend = "threads",
                          .rank = rank,
                          .world_size = world_size,
                          .timeout = options.timeout,
                          .thread_world = world});
      body(rank);
      world->leave(rank);
    } catch (...) {
      first_failure.record(rank, std::current_exception());
      world->abort(rank, failure_text(std::current_exception()));
    }
    if (is_initialized()) {
      destroy_process_group();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back(run_rank, rank);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  first_failure.rethrow_if_any();
}

at::Generator make_generator(uint64_t seed) {
  return at::detail::createCPUGenerator(seed);
}

}  // namespace tessera
