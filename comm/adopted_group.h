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

/// Makes a group of `ranks` of the default group over `backend`, c10d's "gloo". Called by its members; nothing is sent.
/// The group holds a reference to the backend, whose connections last until the program has let go of it too. The
/// program may use the backend's collectives, from the thread that calls this group's, but not its send and recv.
///
/// Throws as new_group(), and:
/// - ValueError if rank and size of `backend` are not those of the group.
/// - NotImplementedError for a backend of another kind or of several network devices.
/// - StateError without a default group.
ProcessGroupPtr adopt_group(const c10::intrusive_ptr<c10d::Backend>& backend, const std::vector<int64_t>& ranks,
                            const std::string& name = "group");

}  // namespace tessera
