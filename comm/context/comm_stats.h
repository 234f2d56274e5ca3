#pragma once
// Counts a rank's communication.
//
//   reset_comm_stats();
//   train_step();
//   fmt::print("{:.1f} MB sent\n", comm_stats().bytes_sent() / 1e6);

#include <array>
#include <cstdint>

#include "comm/context/collective.h"

namespace tessera {

/// Calls and bytes per kind of collective. Bytes are the least that a rank must send with any backend. With n ranks:
/// (n-1) x input for all_gather, (n-1) x output for reduce_scatter, 2 (n-1)/n x tensor for all_reduce, (n-1) x tensor
/// for the source of a broadcast, the tensor for a send, nothing for a recv, and the data for other ranks for the rest.
/// Groups of one rank do not count.
struct CommStats {
  struct Entry {
    int64_t calls = 0;
    int64_t bytes_sent = 0;
  };
  std::array<Entry, kCollectiveCount> entries{};

  const Entry& operator[](Collective kind) const { return entries[static_cast<size_t>(kind)]; }
  int64_t calls() const;
  int64_t bytes_sent() const;
};

/// Returns or resets the counters of the calling thread's rank. Thread safety: any time.
CommStats comm_stats();
void reset_comm_stats();

}  // namespace tessera
