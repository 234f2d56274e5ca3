#pragma once
// How fast messages go from each rank to each other one, and which way is slow.
//
//   const LinkRates rates = measure_links(default_group());       // on all ranks
//   fmt::print("{}\n", describe(rates));   // "rank 1 sends at 1.2 MB/s; the median of all links is 1180 MB/s"
//
// A collective ends late on all ranks where one link is slow, so that its time does not say which. Messages do.

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Rates of all pairs of ranks, equal on all ranks.
struct LinkRates {
  int ranks = 0;
  /// From rank `from` to rank `to` at [from * ranks + to]; 0 where they are one.
  std::vector<double> bytes_per_second = {};

  double rate(int from, int to) const {
    return bytes_per_second.at(static_cast<size_t>(from) * static_cast<size_t>(ranks) + static_cast<size_t>(to));
  }
};

struct LinkOptions {
  int64_t bytes = 1 << 20;  // of a message
  c10::Device device = c10::kCPU;
};

/// Sends messages from each rank to each other one; at one time a rank sends or receives one. Collective. Thread
/// safety: for the rank's thread.
LinkRates measure_links(const ProcessGroupPtr& group, const LinkOptions& options = {});

/// A link below a quarter of the median; `from` or `to` is -1 where all links to or from the other are slow.
struct SlowLink {
  int from = -1;
  int to = -1;
  double bytes_per_second = 0;
  bool operator==(const SlowLink&) const = default;
};

std::vector<SlowLink> find_slow_links(const LinkRates& rates);

/// Says in one line which links are slow, or between what their rates are.
std::string describe(const LinkRates& rates);

}  // namespace tessera
