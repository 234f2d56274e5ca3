#pragma once
// Streaming JSON parser for safetensors headers: rejects malformed text before it allocates for it. Internal.

#include <string>
#include <string_view>

#include "checkpoint/format/safetensors.h"

namespace tessera::dcp {

/// Returns entries in the text's order, with unchecked ranges. Throws CheckpointError that names `file`.
SafetensorsHeader read_header_json(std::string_view text, const std::string& file);

}  // namespace tessera::dcp
