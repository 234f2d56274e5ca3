#pragma once
// What gloo throws, as this library's error.

#include <fmt/format.h>

#include <exception>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// `call`: what failed, "all_reduce(Sum)" say. `peer`: the rank of the group that it waited for, if it is known.
inline CommError gloo_error(const std::string& call, const GroupInfo& info, const std::exception& failure,
                            std::optional<int> peer = std::nullopt) {
  const auto who = peer ? fmt::format("rank {}", info.ranks[static_cast<size_t>(*peer)]) : std::string("a peer");
  return CommError(fmt::format("{} on {}: {} left, called something else, or did not arrive within {} ms: {}", call,
                               describe(info), who, info.timeout.count(), failure.what()));
}

}  // namespace tessera
