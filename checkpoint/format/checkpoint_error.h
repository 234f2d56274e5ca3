#pragma once
// The error of everything that files do: a checkpoint that cannot be written, or that is not what it should be.

#include "base/error.h"

namespace tessera {

/// Names the file, the key where there is one, and what is wrong: the disk is full, a file is missing, truncated or
/// damaged, a header is malformed. Raised on every rank where any rank meets it.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

}  // namespace tessera
