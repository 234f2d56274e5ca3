#pragma once
// The "nccl" backend: one GPU a rank. CUDA tensors only. Two sources implement this header: nccl_backend.cpp under
// --config=cuda, and no_nccl_backend.cpp, which refuses.

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backend/group_backend.h"
#include "comm/nccl/cuda_devices.h"
#include "comm/nccl/nccl_options.h"

namespace tessera {

struct NcclBackendOptions {
  GroupInfo info = {};
  /// For this group alone (a PrefixStore of the default group's).
  c10::intrusive_ptr<c10d::Store> store = {};
  /// Index of the GPU whose tensors it takes.
  int device = 0;
  NcclOptions nccl = {};
};

/// Throws NotImplementedError in a build without NCCL.
void check_nccl_is_built();

/// The GPUs that this process sees. Throws NotImplementedError, StateError (NCCL's header is not libtorch's).
DeviceReport report_devices(int local_rank, int wish);

/// Makes it the calling thread's current CUDA device.
void use_cuda_device(int device);

/// Talks to nobody: NCCL connects the ranks at the first collective. Throws NotImplementedError.
///
/// Sums are NCCL's own: in an order that depends on sizes, ranks and links, not in the order of the ranks. An
/// all_reduce gives all ranks the same bits. Complex tensors are added up as pairs; minima and maxima send a flag with
/// each value, which tells of a NaN (comm/nccl/nccl_reduction.h). A collective runs on the group's
/// stream; wait() makes the current stream wait for it, and the host not, save for barrier().
///
/// Messages are NCCL's: sizes, dtypes and tags cannot be compared, and where sizes differ the receiver's data is wrong
/// or the ranks hang until the time-out. Two ranks have one communicator and one stream for both directions, connected
/// in their first send or recv, which waits for the peer's. So where ranks send to each other, or in a ring, one of
/// each pair has to call recv before send.
c10::intrusive_ptr<GroupBackend> make_nccl_backend(NcclBackendOptions options);

}  // namespace tessera
