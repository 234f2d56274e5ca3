#pragma once
// Notes of ranks' calls for error messages. Over gloo, ranks with different calls both time out without learning of the
// other's call.

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "comm/backend/collective_call.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// Notes in the group's store, or none without a store. Thread safety: any number of threads.
class GlooNotes {
 public:
  explicit GlooNotes(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  /// Records this rank's failed collective `number`, and waits up to half a second for the note of `peer`. A peer times
  /// out at about the same time. Returns "; rank 1 called barrier()" if that differs, otherwise "".
  std::string compare(uint64_t number, const CollectiveSignature& own, const GroupInfo& info, int peer) const noexcept;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace tessera
