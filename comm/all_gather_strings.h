#pragma once
// All-gathers strings over a process group.

#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// Returns all ranks' texts in rank order; cheap if they are equal. All ranks must call it. Throws CommError.
std::vector<std::string> all_gather_strings(const ProcessGroupPtr& group, const std::string& text);

}  // namespace tessera
