#pragma once
// Notes of ranks' calls, for the error of a rank whose peer called something else: over gloo both wait until the
// time-out, and neither learns of the other's call.

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// Notes in the group's store, or none where there is no store. Thread safety: any number of threads.
class GlooNotes {
 public:
  explicit GlooNotes(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  /// Writes down what this rank called as its collective `number`, which failed, and waits up to half a second for
  /// the note of `peer`, whose own time-out ends about now if it has called something. "; rank 1 called
  /// barrier()" where that differs, else "".
  std::string compare(uint64_t number, const CollectiveSignature& own, const GroupInfo& info, int peer) const noexcept;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace tessera
