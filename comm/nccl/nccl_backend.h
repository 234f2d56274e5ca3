#pragma once
// The "nccl" backend: one GPU per rank, CUDA tensors only. nccl_backend.cpp implements it with --config=cuda, and
// no_nccl_backend.cpp throws otherwise.

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backend/group_backend.h"
#include "comm/nccl/cuda_devices.h"
#include "comm/nccl/nccl_options.h"

namespace tessera {

struct NcclBackendOptions {
  GroupInfo info = {};
  c10::intrusive_ptr<c10d::Store> store = {};  // for this group alone (a PrefixStore)
  int device = 0;                              // index of the GPU
  NcclOptions nccl = {};
};

/// Throws NotImplementedError in a build without NCCL.
void check_nccl_is_built();

/// Returns the GPUs that this process sees. Throws NotImplementedError without NCCL, and StateError if NCCL's header
/// differs from libtorch's.
DeviceReport report_devices(int local_rank, int wish);

void use_cuda_device(int device);  // for the calling thread

/// Makes the backend without communication; NCCL connects at the first collective. Throws NotImplementedError without
/// NCCL.
///
/// Sums are NCCL's, in an order that depends on sizes, ranks and links. all_reduce gives all ranks the same bits.
/// Complex tensors are added as pairs, and minima and maxima send a NaN flag with each value
/// (comm/nccl/nccl_reduction.h). Collectives run on the group's stream; wait() blocks the current stream, and the host
/// only for barrier().
///
/// Messages are NCCL's: sizes, dtypes and tags are not compared. If sizes differ, received data is wrong or ranks hang
/// until the timeout. Two ranks have one communicator and stream for both directions, connected in their first send or
/// recv, which waits for the peer's. So if ranks send to each other, or in a ring, one of each pair must call recv
/// before send.
c10::intrusive_ptr<GroupBackend> make_nccl_backend(NcclBackendOptions options);

}  // namespace tessera
