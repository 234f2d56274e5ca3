#pragma once
// Writes the files of a MemoryRecord. Thread safety: one thread per folder and rank.

#include <string>

#include "debug/memory_record.h"

namespace tessera {

/// Writes FOLDER/memory-rank-N.svg (a plot), .txt (live memory at the peak, and growth) and .pickle (for
/// https://pytorch.org/memory_viz). Throws Error if they cannot be written.
void write_memory_files(const MemoryRecord& record, const std::string& folder);

}  // namespace tessera
