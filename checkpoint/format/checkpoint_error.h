#pragma once
// Error for checkpoints that cannot be read or written.

#include "base/error.h"

namespace tessera {

/// Names the file, the key if any, and the problem, such as a full disk or a truncated file.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
