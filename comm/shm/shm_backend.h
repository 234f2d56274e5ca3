#pragma once
// The "shm" backend: processes of one host that share memory. CPU only.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_process.h"

namespace tessera {

struct ShmOptions {
  GroupInfo info = {};
  c10::intrusive_ptr<c10d::Store> store = {};  // for this group alone (a PrefixStore)
  std::vector<HostProcess> processes = {};     // of the group's ranks, in order; on one host
  int host_ranks = 1;                          // all ranks on this host, each of which uses a core
};

/// Maps one piece of memory into all members, which must all call it. Throws CommError on all of them if one fails.
///
/// A launch fills the rank's free slots of that memory; the rest moves in the wait() of any work, as there is no other
/// thread (comm/shm/shm_queue.h). Reductions read peers' slots, in the order of the ranks with the arithmetic of
/// comm/backend/local_reduce.h, so results are the same bits as with other backends. All dtypes move as bytes. A peer's
/// death is noticed within a second. Nothing is left behind, however the ranks end.
///
/// An all_gather whose input is in shared memory (comm/shm/shared_memory.h) needs no slots, as peers read the input in
/// place; likewise for such pieces of a reduce_scatter's input. Its work is done when peers have read, or, for segment
/// forms, when the output is ready.
///
/// Messages use separate slots for each direction (comm/shm/shm_layout.h), for which the group keeps its file open:
/// one descriptor per rank.
c10::intrusive_ptr<GroupBackend> make_shm_backend(ShmOptions options);

}  // namespace tessera
