#pragma once
// The "gloo" backend: processes that communicate over TCP. CPU only.

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_process.h"

namespace tessera {

struct GlooOptions {
  GroupInfo info = {};
  c10::intrusive_ptr<c10d::Store> store = {};  // for this group alone (a PrefixStore)
  std::vector<HostProcess> processes = {};     // of the members, if known
  /// Address where ranks met. A loopback address keeps all traffic on the loopback interface; "" uses the host's name.
  std::string master_addr = {};
};

/// Connects all members of the group, which must all call it. Throws CommError, within a second if a member on this
/// host has died.
///
/// Reductions follow the order of the ranks with the arithmetic of comm/backend/local_reduce.h, so results are the same
/// bits on all ranks and as with "threads". reduce_scatter is an all-to-all and a local reduction in wait(). all_reduce
/// gathers small tensors; others are a reduce_scatter and an all_gather for each piece of 2 MiB a rank, which a thread
/// of the group launches (comm/gloo/gloo_rounds.h). The source of a broadcast sends to every rank. All dtypes
/// move as bytes.
///
/// If ranks make different calls, or use different operations, dtypes or sizes, each pair of ranks that differ gets a
/// CommError after the group's timeout. It describes this rank's call, and the other rank's if that fails within half a
/// second. (Two calls in four million are not distinguished.)
///
/// The first backend of a process makes it ignore SIGPIPE, unless the program handles it; otherwise gloo would end a
/// rank whose peer has died before it could report an error. Child processes do not inherit connections, so peers
/// notice a rank's end.
///
/// A work's isCompleted() is changed by wait() alone. A work dropped without wait() keeps its tensors until a later
/// collective of all ranks was waited for, or the group is destroyed (comm/gloo/gloo_work.h). Messages:
/// comm/gloo/gloo_messages.h.
///
/// Works do not keep the backend alive. Its destruction fails an all_reduce in pieces at once, so that a rank that
/// leaves by an exception does not wait for peers. Other works keep the connections and end when peers come, leave or
/// time out.
c10::intrusive_ptr<GroupBackend> make_gloo_backend(GlooOptions options);

/// Makes the backend over existing connections of c10d's own backend with the same ranks. Returns null if that is not
/// gloo's. Throws NotImplementedError if it has several network devices.
c10::intrusive_ptr<GroupBackend> adopt_gloo_backend(GroupInfo info,
                                                    const c10::intrusive_ptr<c10d::Backend>& connections);

}  // namespace tessera
