#pragma once
// Kinds of communication that are counted, observed and compared between ranks.

#include <cstdint>
#include <string_view>

namespace tessera {

/// A collective, or a message between two ranks.
enum class Collective : uint8_t {
  AllGather,
  ReduceScatter,
  AllReduce,
  Broadcast,
  AllToAll,
  Scatter,
  Gather,
  Barrier,
  Send,
  Recv,
};
constexpr int kCollectiveCount = 10;

/// Returns the function's name, such as "all_gather".
std::string_view name(Collective collective);

}  // namespace tessera
