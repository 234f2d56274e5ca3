#pragma once
// Converts gloo's exceptions.

#include <fmt/format.h>

#include <exception>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// Returns a CommError for failed `call`, such as "all_reduce(Sum)". `peer` is the awaited rank of the group, if known.
inline CommError gloo_error(const std::string& call, const GroupInfo& info, const std::exception& failure,
                            std::optional<int> peer = std::nullopt) {
  const auto who = peer ? fmt::format("rank {}", info.ranks[static_cast<size_t>(*peer)]) : std::string("a peer");
  return CommError(fmt::format("{} on {}: {} left, called something else, or did not arrive within {} ms: {}", call,
                               describe(info), who, info.timeout.count(), failure.what()));
}

}  // namespace tessera
