#pragma once
// Progress of a save or load.

#include <cstdint>
#include <functional>

namespace tessera::dcp {

struct Progress {  // of this rank's own data
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
};
using ProgressFn = std::function<void(const Progress&)>;

}  // namespace tessera::dcp
