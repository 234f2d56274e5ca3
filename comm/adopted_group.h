#pragma once
// Process groups over a c10d::ProcessGroupGloo that the program has already connected.

#include "comm/process_group.h"

namespace c10d {
class Backend;
}

namespace tessera {

/// Makes a group of `ranks` over `backend`, which it references. Collectives are this library's; nothing is sent.
/// Throws like new_group(), ValueError for another rank or size, and NotImplementedError for another kind of backend.
ProcessGroupPtr adopt_group(const c10::intrusive_ptr<c10d::Backend>& backend, const std::vector<int64_t>& ranks,
                            const std::string& name = "group");

}  // namespace tessera
