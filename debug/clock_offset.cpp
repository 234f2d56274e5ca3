#include "debug/clock_offset.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <limits>

#include "base/error.h"
#include "comm/all_gather_strings.h"
#include "comm/collectives.h"

namespace tessera {

namespace {

constexpr int kRounds = 20;

/// Returns the identity of the running kernel, whose clock all of its processes share.
std::string kernel_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(file, identity);
  if (identity.empty()) {
    std::array<char, 256> host{};
    gethostname(host.data(), host.size() - 1);
    identity = host.data();
  }
  return identity;
}

}  // namespace

int64_t clock_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

ClockOffset offset_from_readings(const std::vector<ClockReading>& own, const std::vector<ClockReading>& of_rank_0) {
  TESSERA_ASSERT(own.size() == of_rank_0.size() && !own.empty(), "{} readings and {}", own.size(), of_rank_0.size());
  int64_t least = std::numeric_limits<int64_t>::min(), most = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < own.size(); ++i) {
    least = std::max(least, own[i].before_ns - of_rank_0[i].after_ns);
    most = std::min(most, own[i].after_ns - of_rank_0[i].before_ns);
  }
  return {.ns = least + (most - least) / 2, .error_ns = (most - least + 1) / 2};
}

ClockOffset measure_clock_offset(const ProcessGroupPtr& group) {
  const auto kernels = all_gather_strings(group, kernel_identity());
  if (std::ranges::count(kernels, kernels[0]) == std::ssize(kernels)) {
    return {};
  }
  const auto device = has_backend(group, at::kCPU) ? at::kCPU : at::kCUDA;
  std::vector<ClockReading> own(kRounds), of_rank_0(kRounds);
  for (int round = 0; round <= kRounds; ++round) {  // each round starts after the previous one
    auto sent = at::empty({2}, at::kLong);
    auto* const data = sent.mutable_data_ptr<int64_t>();
    data[1] = round > 0 ? own[static_cast<size_t>(round) - 1].after_ns : 0;
    const auto all = at::empty({int64_t{2} * get_world_size(group)}, at::dtype(at::kLong).device(device));
    const int64_t before = data[0] = clock_ns();
    all_gather(all, sent.to(device), group);
    const auto gathered = all.cpu();
    const int64_t after = clock_ns();
    const auto* const of_first = gathered.const_data_ptr<int64_t>();
    if (round > 0) {
      of_rank_0[static_cast<size_t>(round) - 1].after_ns = of_first[1];
    }
    if (round < kRounds) {
      own[static_cast<size_t>(round)] = {.before_ns = before, .after_ns = after};
      of_rank_0[static_cast<size_t>(round)].before_ns = of_first[0];
    }
  }
  return offset_from_readings(own, of_rank_0);
}

}  // namespace tessera
