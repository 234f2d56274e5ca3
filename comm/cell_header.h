#pragma once
// The head of the cell that opens a call: what the rank called, in plain bytes, for its peers to compare.

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <string>

#include "comm/local_call.h"
#include "comm/shared_memory.h"

namespace tessera {

/// Writes ShmLayout::header_bytes() at most. `steps`: what this rank alone needs. `lent`: where the input of an
/// all_gather is, if the peers are to read it there and not in the cells.
void write_header(char* cell, const CallShape& call, int64_t steps, const std::optional<SharedPlace>& lent);
std::optional<SharedPlace> read_lent(const char* cell);

struct HeaderAgreement {
  /// "" if the calls belong together; otherwise what each rank called.
  std::string mismatch = {};
  /// The most that a rank needs.
  int64_t steps = 1;
};

/// Compares the heads of all ranks' cells, in order.
HeaderAgreement compare_headers(c10::ArrayRef<const char*> cells);

}  // namespace tessera
