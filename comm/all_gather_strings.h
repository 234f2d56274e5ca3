#pragma once
// What each rank of a group has to say, on all of them.

#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera {

/// The texts of all ranks of `group`, in their order. One collective of 16 bytes a rank where all are equal (told by
/// size and hash), a second one where they are not. Collective; throws CommError.
std::vector<std::string> all_gather_strings(const ProcessGroupPtr& group, const std::string& text);

}  // namespace tessera
