#pragma once
// Measures the message rate from each rank to every other, to find slow links.
//
//   const LinkRates rates = measure_links(default_group());       // on all ranks
//   fmt::print("{}\n", describe(rates));   // "rank 1 sends at 1.2 MB/s; the median of all links is 1180 MB/s"
//
// With one slow link, a collective finishes late on all ranks, so its time does not show which one. Messages do.

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Rates of all pairs of ranks, equal on all ranks.
struct LinkRates {
  int ranks = 0;
  /// Rate from rank `from` to rank `to` at [from * ranks + to]; 0 if they are equal.
  std::vector<double> bytes_per_second = {};

  double rate(int from, int to) const {
    return bytes_per_second.at(static_cast<size_t>(from) * static_cast<size_t>(ranks) + static_cast<size_t>(to));
  }
};

struct LinkOptions {
  int64_t bytes = 1 << 20;  // per message
  c10::Device device = c10::kCPU;
};

/// Sends messages from each rank to every other. Each rank sends or receives one message at a time. Collective. Thread
/// safety: for the rank's thread.
LinkRates measure_links(const ProcessGroupPtr& group, const LinkOptions& options = {});

/// Link below a quarter of the median rate. `from` or `to` is -1 if all links to or from the other rank are slow.
struct SlowLink {
  int from = -1;
  int to = -1;
  double bytes_per_second = 0;
  bool operator==(const SlowLink&) const = default;
};

std::vector<SlowLink> find_slow_links(const LinkRates& rates);

/// Returns one line that lists the slow links, or else the range of the rates.
std::string describe(const LinkRates& rates);

}  // namespace tessera
