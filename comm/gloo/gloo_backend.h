#pragma once
// The "gloo" backend: ranks are processes that talk over TCP. CPU only.

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_process.h"

namespace tessera {

struct GlooOptions {
  GroupInfo info = {};
  /// For this group alone (a PrefixStore of the default group's).
  c10::intrusive_ptr<c10d::Store> store = {};
  /// The members'; none: not known.
  std::vector<HostProcess> processes = {};
  /// Where the ranks met: a loopback address keeps all traffic on the loopback interface. "": the host's own name.
  std::string master_addr = {};
};

/// Connects to all members of the group; every member calls it. Throws CommError, within a second if a member on this
/// host has died.
///
/// Sums are not gloo's own: every reduction is in the order of the ranks with the arithmetic of
/// comm/backend/local_reduce.h, so that results are the same bits on all ranks and as with the "threads" backend.
/// reduce_scatter is an all-to-all and a local reduction in wait(); all_reduce gathers all tensors where they are small
/// or the ranks are two, and otherwise is a reduce_scatter and an all_gather, which a thread of the group's own
/// launches (comm/gloo/gloo_rounds.h); the source of a broadcast sends to every rank. Every dtype moves as bytes.
///
/// Ranks that call different collectives, or the same one for other operations, dtypes or sizes, have a CommError after
/// the group's time-out, which says what this rank called, and what the other did if that fails within half a second:
/// each pair of ranks whose calls do not fit. (Two calls in four million are not told apart.)
///
/// The first such backend of a process makes it ignore SIGPIPE, unless the program has a handler for that: by it gloo
/// would end a rank whose peer has died, before an error could say so.
///
/// Programs that a rank starts do not inherit its connections, so that peers notice a rank's end while such a program
/// goes on.
///
/// A work's isCompleted() is told by its wait() alone. One that is dropped without wait() keeps its tensors, until a
/// later collective with all ranks was waited for or the group goes (comm/gloo/gloo_work.h). Messages between two
/// ranks: comm/gloo/gloo_messages.h.
///
/// Works do not keep the backend. When it goes, an all_reduce in two rounds fails at once, also one that is waited for:
/// a rank that leaves by an exception must not wait for peers that do not come. Other works keep the connections and go
/// on; their waits end when the peers come or leave, or by the group's time-out.
c10::intrusive_ptr<GroupBackend> make_gloo_backend(GlooOptions options);

/// The same over connections that there are already: c10d's own backend, of the same ranks. Null if it is not gloo's;
/// throws NotImplementedError if it is, with several network devices.
c10::intrusive_ptr<GroupBackend> adopt_gloo_backend(GroupInfo info,
                                                    const c10::intrusive_ptr<c10d::Backend>& connections);

}  // namespace tessera
