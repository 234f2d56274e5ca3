#include "debug/link_rates.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/collectives.h"
#include "comm/context/flight_record.h"
#include "comm/point_to_point.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMessages = 3;  // the fastest counts
constexpr double kSlow = 0.25;

/// Sends one message to `peer`, or receives it, or does neither (peer -1), once all ranks are ready. Returns the time.
double seconds_of_message(int peer, bool sends, const at::Tensor& message, const ProcessGroupPtr& group) {
  barrier(group);
  const auto begin = Clock::now();
  if (peer >= 0 && sends) {
    send(message, peer, group);
  } else if (peer >= 0) {
    recv(message, peer, group);
    message[0].item<uint8_t>();  // waits until a GPU has received it
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

std::vector<double> sorted_rates(const LinkRates& rates) {
  std::vector<double> sorted;
  std::ranges::copy_if(rates.bytes_per_second, std::back_inserter(sorted), [](double rate) { return rate > 0; });
  std::ranges::sort(sorted);
  return sorted;
}

std::string in_megabytes(double rate) {
  return fmt::format("{:.{}f} MB/s", rate * 1e-6, rate < 1e7 ? 1 : 0);
}

}  // namespace

LinkRates measure_links(const ProcessGroupPtr& group, const LinkOptions& options) {
  const FlightLabel label("links");
  const int ranks = group->getSize(), own = group->getRank();
  const auto message = at::zeros({options.bytes}, at::TensorOptions(options.device).dtype(at::kByte));
  const auto rates = at::zeros({ranks, ranks}, at::TensorOptions(at::kCPU).dtype(at::kDouble));
  for (int round = 0; ranks > 1 && round < ranks; ++round) {
    const int other = (round - own + ranks) % ranks;
    const int peer = other == own ? -1 : other;
    for (const bool lower_sends : {true, false}) {
      const bool sends = (own < peer) == lower_sends;
      double seconds = std::numeric_limits<double>::infinity();
      for (int i = 0; i < kMessages; ++i) {
        seconds = std::min(seconds, seconds_of_message(peer, sends, message, group));
      }
      if (peer >= 0 && !sends) {
        rates[peer][own] = static_cast<double>(options.bytes) / seconds;
      }
    }
  }
  const auto summed = rates.to(options.device);
  if (ranks > 1) {
    all_reduce(summed, ReduceOp::Sum, group);  // each rank has the times of its messages
  }
  const auto all = summed.cpu();
  const auto* const first = all.const_data_ptr<double>();
  return {.ranks = ranks, .bytes_per_second = std::vector(first, first + all.numel())};
}

std::vector<SlowLink> find_slow_links(const LinkRates& rates) {
  const auto sorted = sorted_rates(rates);
  const double limit = sorted.empty() ? 0 : kSlow * sorted[sorted.size() / 2];
  const auto is_slow = [&](int from, int to) { return from == to || rates.rate(from, to) < limit; };
  std::vector<SlowLink> found;
  std::vector<bool> sends_slowly(static_cast<size_t>(rates.ranks)), receives_slowly(sends_slowly);
  const auto add_rank = [&](int rank, bool sends) {
    SlowLink link{.from = sends ? rank : -1, .to = sends ? -1 : rank};
    for (int other = 0; other < rates.ranks; ++other) {
      if (!is_slow(sends ? rank : other, sends ? other : rank)) {
        return false;
      }
      link.bytes_per_second =
          std::max(link.bytes_per_second, sends ? rates.rate(rank, other) : rates.rate(other, rank));
    }
    found.push_back(link);
    return true;
  };
  for (int rank = 0; rates.ranks > 2 && rank < rates.ranks; ++rank) {
    sends_slowly[static_cast<size_t>(rank)] = add_rank(rank, true);
    receives_slowly[static_cast<size_t>(rank)] = add_rank(rank, false);
  }
  for (int from = 0; from < rates.ranks; ++from) {
    for (int to = 0; to < rates.ranks; ++to) {
      if (from != to && is_slow(from, to) && !sends_slowly[static_cast<size_t>(from)] &&
          !receives_slowly[static_cast<size_t>(to)]) {
        found.push_back({.from = from, .to = to, .bytes_per_second = rates.rate(from, to)});
      }
    }
  }
  return found;
}

std::string describe(const LinkRates& rates) {
  const auto sorted = sorted_rates(rates);
  if (sorted.empty()) {
    return "one rank has no links";
  }
  std::vector<std::string> texts;
  for (const auto& link : find_slow_links(rates)) {
    const auto who = link.to < 0     ? fmt::format("rank {} sends", link.from)
                     : link.from < 0 ? fmt::format("rank {} receives", link.to)
                                     : fmt::format("rank {} sends to rank {}", link.from, link.to);
    texts.push_back(fmt::format("{} at {}", who, in_megabytes(link.bytes_per_second)));
  }
  if (texts.empty()) {
    return fmt::format("no link is slow: {} to {}", in_megabytes(sorted.front()), in_megabytes(sorted.back()));
  }
  return fmt::format("{}; the median of all links is {}", fmt::join(texts, ", "),
                     in_megabytes(sorted[sorted.size() / 2]));
}

}  // namespace tessera
