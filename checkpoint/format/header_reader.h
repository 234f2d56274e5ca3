#pragma once
// The JSON of a safetensors header, read as it comes, so that text which is no header is refused before anything grows
// with it; internal to this package.

#include <string>
#include <string_view>

#include "checkpoint/format/safetensors.h"

namespace tessera::dcp {

/// Entries as they stand in the text; their bytes are not checked. Throws CheckpointError that names `file`.
SafetensorsHeader read_header_json(std::string_view text, const std::string& file);

}  // namespace tessera::dcp
