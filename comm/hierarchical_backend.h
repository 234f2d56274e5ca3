#pragma once
// The "hierarchical" backend for CPU tensors: shared memory on each host, TCP across hosts. docs/semantics.md describes
// its collectives and their order of reduction.

#include <functional>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_layout.h"

namespace tessera {

struct HierarchicalOptions {
  GroupInfo info = {};
  HostLayout layout = {};
  c10::intrusive_ptr<GroupBackend> host = {};                        // this host's ranks; must support segments
  c10::intrusive_ptr<GroupBackend> across = {};                      // ranks with the same place on all hosts
  std::function<c10::intrusive_ptr<GroupBackend>()> make_flat = {};  // all ranks; called by the first all_to_all
};

/// Makes the backend, which runs collectives in order on its own thread. A failed one fails all later ones. Throws
/// ValueError for tensors that are not dense and on the CPU. Thread safety: one thread at a time.
c10::intrusive_ptr<GroupBackend> make_hierarchical_backend(HierarchicalOptions options);

}  // namespace tessera
