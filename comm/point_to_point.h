#pragma once
// Messages between two ranks of a group; the other ranks take no part.
//
// A ring of 3 ranks, in which every rank passes x on:
//   Pending sent = send_async(x, (rank + 1) % 3, group);
//   recv(y, (rank + 2) % 3, group);                        y = x of the rank before
//   sent.wait();
//
// Messages from one rank to another arrive in the order of their sends. The k-th send and the k-th recv of a pair agree
// on the number of elements, the dtype and the tag, which only checks that both mean the same message. There is no
// order relative to other pairs, the other direction, or the group's collectives.
//
// A send may wait for its recv, whatever the size. Ranks that send to each other, or in a ring, call send_async and
// then recv. Any number may be in flight, and waits may come in any order.
//
// Tensors are dense and contiguous, of any dtype, and may be empty. No autograd; version counters do not change. Limits
// of backends: comm/hierarchical_backend.h, comm/nccl/nccl_backend.h.
//
// Throws:
// - ValueError, before anything is sent, for a tensor or peer that does not fit.
// - CommError, naming group and call, on both ranks if send and recv do not match.
// - CommError if the peer left, died, or did not arrive in time.
//
// Source: torch/distributed/distributed_c10d.py, where tags choose messages.

#include <ATen/core/Tensor.h>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {

/// Sends `tensor` to rank `peer` of the group. It may not be written until the Pending's wait() returns.
/// Thread safety of all: each rank from one thread at a time.
void send(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);
Pending send_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);

/// Receives what rank `peer` of the group sends into `tensor`.
void recv(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);
Pending recv_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);

}  // namespace tessera
