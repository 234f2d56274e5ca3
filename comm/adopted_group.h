#pragma once
// Process groups over connections that a program has made already, through c10d.
//
//   c10::intrusive_ptr<c10d::ProcessGroupGloo> theirs = ...;          // of ranks 4 to 7 of the program
//   init_process_group({.rank = rank, .world_size = 8, .store = ...});
//   ProcessGroupPtr group = adopt_group(theirs, {4, 5, 6, 7}, "tp");  // on these four
//   all_reduce(tensor, ReduceOp::Sum, group);
//   DeviceMesh mesh = DeviceMesh::from_group(group, at::kCPU, "tp");  // device_mesh/device_mesh.h
//
// The group's collectives are this library's: reductions are in the order of the ranks, and ranks that call different
// things have an error. Only the connections are the program's.

#include "comm/process_group.h"

namespace c10d {
class Backend;
}

namespace tessera {

/// A group of `ranks` of the default group, in this order, over `backend`, which connects them: c10d's "gloo". Called
/// by its members, by each once for a backend; nothing is sent. Its time-out is the default group's.
///
/// The group owns a reference to the backend, and destroy_process_group() does not end it: the connections last until
/// both the program and the group have let go of them. The program may go on to use the backend's collectives, from the
/// thread that calls this group's, but its send and recv share the tags of this group's calls. Works of the group must
/// have been waited for when it goes.
///
/// Throws as new_group(), ValueError if rank and size of `backend` are not those of the group, NotImplementedError for
/// a backend of another kind, or of several network devices (as several names in GLOO_SOCKET_IFNAME make), StateError
/// without a default group.
ProcessGroupPtr adopt_group(const c10::intrusive_ptr<c10d::Backend>& backend, const std::vector<int64_t>& ranks,
                            const std::string& name = "group");

}  // namespace tessera
