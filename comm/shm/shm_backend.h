#pragma once
// The "shm" backend: ranks are processes of one host that share memory. CPU only.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_process.h"

namespace tessera {

struct ShmOptions {
  GroupInfo info = {};
  /// For this group alone (a PrefixStore of the default group's).
  c10::intrusive_ptr<c10d::Store> store = {};
  /// Of the group's ranks, in order; on one host.
  std::vector<HostProcess> processes = {};
  /// All ranks on this host, of which each wants a core.
  int host_ranks = 1;
};

/// Maps one piece of memory into all members; every member calls it. Throws CommError on all of them if one cannot.
///
/// A launch puts what fits into the rank's slots of that memory, the rest moves in wait(), of whichever work: no thread
/// runs beside the rank's own (comm/shm/shm_queue.h). Reductions read the peers' slots and write the result, in the
/// order of the ranks with the arithmetic of comm/backend/local_reduce.h, so they are the same bits as with the other
/// backends. Every dtype moves as bytes. A peer that dies is noticed within a second. Nothing is left behind, however
/// the ranks end.
///
/// An all_gather whose input is in shared memory (comm/shm/shared_memory.h) needs no slots: the peers read it there. So
/// do the pieces of a reduce_scatter's input that lie there. Its work is done when they have, or, of calls with parts,
/// when the output is there.
///
/// Messages between two ranks go through slots of their own, for each direction (comm/shm/shm_layout.h). The group
/// keeps its file open for them, one descriptor a rank.
c10::intrusive_ptr<GroupBackend> make_shm_backend(ShmOptions options);

}  // namespace tessera
