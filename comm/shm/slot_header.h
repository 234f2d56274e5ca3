#pragma once
// The head of a slot, in plain bytes. That of the slot that opens a call says what the rank called, for its peers to
// compare; those of a reduce_scatter, where pieces are that are not in the slot.

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>

#include "comm/backend/collective_call.h"
#include "comm/shm/shared_memory.h"

namespace tessera {

/// Writes ShmLayout::header_bytes() at most. `steps`: what this rank alone needs. `lent`: where the input of an
/// all_gather is, if the peers are to read it there and not in the slots.
void write_header(char* slot, const CollectiveSignature& call, int64_t steps, const std::optional<SharedPlace>& lent);
std::optional<SharedPlace> read_exposed(const char* slot);

/// Of a step of a reduce_scatter: where this rank's piece for rank `to` is, if it is to be read there and not in the
/// slot.
void write_piece_place(char* slot, int to, const std::optional<SharedPlace>& place);
std::optional<SharedPlace> read_piece_place(const char* slot, int to);

struct HeaderAgreement {
  /// "" if the calls belong together; otherwise what each rank called.
  std::string mismatch = {};
  /// The most that a rank needs.
  int64_t steps = 1;
};

/// Compares the heads of all ranks' slots, in order.
HeaderAgreement compare_headers(c10::ArrayRef<const char*> slots);

}  // namespace tessera
