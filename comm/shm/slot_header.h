#pragma once
// Header of a slot, as bytes. The first slot of a call describes the rank's call, for peers to compare. The slots of a
// reduce_scatter also locate pieces outside the slot.

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>

#include "comm/backend/collective_call.h"
#include "comm/shm/shared_memory.h"

namespace tessera {

/// Writes at most ShmLayout::header_bytes(). `steps` is the number that this rank needs. `exposed` locates the input of
/// an all_gather if peers will read it in place.
void write_header(char* slot, const CollectiveSignature& call, int64_t steps,
                  const std::optional<SharedPlace>& exposed);
std::optional<SharedPlace> read_exposed(const char* slot);

/// Locates this rank's piece for rank `to` in a reduce_scatter, if it is to be read in place.
void write_piece_place(char* slot, int to, const std::optional<SharedPlace>& place);
std::optional<SharedPlace> read_piece_place(const char* slot, int to);

struct HeaderAgreement {
  std::string mismatch = {};  // "" if the calls match; otherwise each rank's call
  int64_t steps = 1;          // the maximum over ranks
};

/// Compares the headers of all ranks' slots, in order.
HeaderAgreement compare_headers(c10::ArrayRef<const char*> slots);

}  // namespace tessera
