#pragma once
// Files of a MemoryRecord. Thread safety: one thread a folder and rank.

#include <string>

#include "debug/memory_record.h"

namespace tessera {

/// Writes FOLDER/memory-rank-N.svg, .txt and .pickle: a picture, what is alive at the peak and what grew, and what
/// https://pytorch.org/memory_viz opens. Throws Error if they cannot be written.
void write_memory_files(const MemoryRecord& record, const std::string& folder);

}  // namespace tessera
