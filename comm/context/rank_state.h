#pragma once
// State of a rank context; internal to comm.

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <typeindex>

#include "comm/context/collective.h"
#include "comm/context/comm_observer.h"
#include "comm/context/flight_record.h"
#include "comm/context/rank_context.h"

namespace tessera::detail {

struct RankState : std::enable_shared_from_this<RankState> {
  struct Counter {
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> bytes_sent{0};
  };

  explicit RankState(uint64_t number) : number(number) {}

  const uint64_t number;    // 0 for the process's first
  uint32_t init_count = 0;  // attempts of init_process_group (comm/context/rank_context.h)
  std::array<Counter, kCollectiveCount> counters;
  std::atomic<CommObserver*> observer{nullptr};
  const std::shared_ptr<FlightRecord> flight_record = std::make_shared<FlightRecord>();
  std::mutex locals_mutex;
  std::map<std::type_index, std::shared_ptr<void>> locals;  // rank_local<T>(), by T
};

/// Returns the state that the calling thread acts in.
RankState& rank_state();

/// Resets the state of a process that is one rank, as if it had just started. Destroys its groups with the old state.
/// No other thread acts as the rank meanwhile.
void renew_process_state();

/// True while no observer sees the calling thread's collectives.
inline constinit thread_local bool is_unobserved = false;

inline void count_collective(Collective kind, int64_t bytes_sent) {
  RankState& state = rank_state();
  RankState::Counter& counter = state.counters[static_cast<size_t>(kind)];
  counter.calls.fetch_add(1, std::memory_order_relaxed);
  counter.bytes_sent.fetch_add(bytes_sent, std::memory_order_relaxed);
  CommObserver* const observer = state.observer.load(std::memory_order_relaxed);
  if (observer != nullptr && !is_unobserved) {
    observer->on_collective(kind, bytes_sent);
  }
}

}  // namespace tessera::detail
