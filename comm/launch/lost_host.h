#pragma once
// Detects that a host is lost through a power or cable failure, after which nothing reports that connections have
// ended.

#include <chrono>
#include <vector>

namespace tessera {

/// Limit for another host's acknowledgement. Its system responds regardless of how busy a rank is.
constexpr std::chrono::milliseconds kLongestSilence = std::chrono::seconds(5);

/// Makes those of `sockets` that are connected to another host report an error after kLongestSilence, even while
/// nothing is sent. Ignores other files.
void limit_silence(const std::vector<int>& sockets);

}  // namespace tessera
