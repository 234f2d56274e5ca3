#pragma once
// Messages between two ranks of a group; the other ranks take no part.
//
// A ring of 3 ranks, in which every rank passes x on:
//   Pending sent = send_async(x, (rank + 1) % 3, group);
//   recv(y, (rank + 2) % 3, group);                        y = x of the rank before
//   sent.wait();
//
// Messages from one rank to another arrive in the order of their sends: the k-th send meets the k-th recv of this
// ordered pair. The two must agree on the number of elements, the dtype and the tag, which is for the ranks to tell
// kinds of messages apart, and chooses none. Nothing is said about their order relative to messages between other
// ranks, to those in the other direction, and to the group's collectives.
//
// A send may wait for its recv, whatever the size. So ranks that send to each other, or in a ring, call send_async and
// then recv, or recv_async and then send. Any number may be in flight, and waits may come in any order.
//
// Tensors are dense and contiguous; sizes are compared by number of elements, and 0 elements are a message too. Every
// dtype moves as bytes. No autograd, and a written tensor's version counter does not change. Backends say what else
// holds: "hierarchical" knows no way between some ranks, "nccl" compares nothing and needs recv before send on one side
// of each pair (comm/hierarchical_backend.h, comm/nccl/nccl_backend.h).
//
// Throws ValueError for a tensor or peer that does not fit (before anything is sent), also in a group of one rank;
// CommError that names group and call when the peer sends something else than is received (on both ranks; what it holds
// then is unspecified, and later messages on the same way may fail as well), left, died, or did not arrive in time.
//
// After send, recv, isend and irecv of torch/distributed/distributed_c10d.py, where tags choose messages, and of gloo,
// which does not compare what it moves.

#include <ATen/core/Tensor.h>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {

/// Sends tensor to rank `peer` of the group. Until the wait() of its Pending the tensor may not be written.
/// Thread safety of all: each rank from one thread at a time.
void send(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);
Pending send_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);

/// tensor = what rank `peer` of the group sends, in place.
void recv(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);
Pending recv_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);

}  // namespace tessera
