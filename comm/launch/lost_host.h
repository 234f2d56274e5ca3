#pragma once
// Connections to a host that is lost, by its power or its cable: nothing says that they have ended.

#include <chrono>
#include <vector>

namespace tessera {

/// How long another host may leave what it was sent without an answer. Its system answers, however busy a rank is.
constexpr std::chrono::milliseconds kLongestSilence = std::chrono::seconds(5);

/// Lets those of `sockets` that are connected to another host have an error after kLongestSilence, also while nothing
/// is sent. Ignores other files.
void limit_silence(const std::vector<int>& sockets);

}  // namespace tessera
