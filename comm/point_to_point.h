#pragma once
// Messages between two ranks of a group, in order per pair and direction. A send may block until the peer calls recv;
// ranks that send to each other, or in a ring, call send_async first. Tensors are dense and contiguous.
// Throws ValueError for a tensor or peer that does not fit, and CommError if the peer left, timed out, or calls with
// another numel, dtype or tag (on both ranks).
// Thread safety: one thread at a time per rank. Source: torch/distributed/distributed_c10d.py.

#include <ATen/core/Tensor.h>

#include "comm/collectives.h"
#include "comm/process_group.h"

namespace tessera {

/// Sends `tensor`, which must not be written until wait() returns.
void send(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);
Pending send_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);

void recv(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);
Pending recv_async(const at::Tensor& tensor, int peer, const ProcessGroupPtr& group, int tag = 0);

}  // namespace tessera
