#include "comm/context/comm_stats.h"

#include "comm/context/rank_state.h"

namespace tessera {

int64_t CommStats::calls() const {
  int64_t total = 0;
  for (const Entry& entry : entries) {
    total += entry.calls;
  }
  return total;
}

int64_t CommStats::bytes_sent() const {
  int64_t total = 0;
  for (const Entry& entry : entries) {
    total += entry.bytes_sent;
  }
  return total;
}

CommStats comm_stats() {
  CommStats stats;
  const auto& counters = detail::rank_state().counters;
  for (size_t kind = 0; kind < counters.size(); ++kind) {
    stats.entries[kind] = {counters[kind].calls.load(std::memory_order_relaxed),
                           counters[kind].bytes_sent.load(std::memory_order_relaxed)};
  }
  return stats;
}

void reset_comm_stats() {
  for (auto& counter : detail::rank_state().counters) {
    counter.calls.store(0, std::memory_order_relaxed);
    counter.bytes_sent.store(0, std::memory_order_relaxed);
  }
}

}  // namespace tessera
