#pragma once
// How far a save or load has come.

#include <cstdint>
#include <functional>

namespace tessera::dcp {

/// Of this rank's own bytes.
struct Progress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};
using ProgressFn = std::function<void(const Progress&)>;

}  // namespace tessera::dcp
