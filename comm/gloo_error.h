#pragma once
// What gloo throws, as this library's error.

#include <fmt/format.h>

#include <exception>
#include <string>

#include "base/error.h"
#include "comm/group_backend.h"

namespace tessera {

/// `call`: what failed, "all_reduce(Sum)" say.
inline CommError gloo_error(const std::string& call, const GroupInfo& info, const std::exception& failure) {
  return CommError(fmt::format("{} on {}: a peer left, called something else, or did not arrive within {} ms: {}", call,
                               describe(info), info.timeout.count(), failure.what()));
}

}  // namespace tessera
