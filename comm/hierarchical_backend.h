#pragma once
// The "hierarchical" backend: ranks on several hosts of which each has several. Data crosses the network once a host
// and not once a rank: each collective is one among the ranks of a host, over shared memory, and one among the ranks
// that have the same place on their hosts, over TCP. CPU only.
//
//   all_gather         across hosts, then on the host
//   reduce_scatter     on the host, then across hosts
//   all_reduce         reduce_scatter on the host, all_reduce across, all_gather on the host
//   broadcast          across hosts from the source, then on each host
//   all_to_all         between all ranks, over a flat group that the first such call makes
//   send, recv         on the host, or across hosts between ranks that have the same place; others are refused
//                      (NotImplementedError): a group of the two ranks has its own connection
//
// Reductions add up each host's ranks first, and then the hosts, in their orders: the same bits on all ranks and in
// every run, but other ones than a flat group's. A host's result of a 16-bit type is rounded before it crosses.

#include <functional>

#include "comm/backend/group_backend.h"
#include "comm/launch/host_layout.h"

namespace tessera {

struct HierarchicalOptions {
  GroupInfo info = {};
  HostLayout layout = {};
  /// Among the ranks of this host, which takes parts, and across hosts; both in the order of the group's ranks. No
  /// others use them.
  c10::intrusive_ptr<GroupBackend> host = {};
  c10::intrusive_ptr<GroupBackend> across = {};
  /// Makes a flat backend among all ranks; called on all of them, by the first all_to_all.
  std::function<c10::intrusive_ptr<GroupBackend>()> make_flat = {};
};

/// Collectives run one after the other on a thread of the backend's own, so that a rank's waits may come in any order.
/// One that failed fails the later ones. When the backend goes, it waits for the one that runs, and the later ones
/// fail. Messages go to the backends below at once, which must allow that beside a collective, as this library's do.
/// Tensors must be dense, contiguous and on the CPU (ValueError). Thread safety: for one thread at a time.
c10::intrusive_ptr<GroupBackend> make_hierarchical_backend(HierarchicalOptions options);

}  // namespace tessera
