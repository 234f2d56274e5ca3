#pragma once
// Chooses each rank's GPU from the GPUs visible to all ranks.
//
//   rank   on host   number there   sees     takes
//   0      a         0              2 GPUs   0
//   1      a         1              2 GPUs   1
//   2      b         0              1 GPU    0      (a launcher that shows each process its own GPU)
//
// Each rank reports through the store, and a pure function of all reports chooses or throws. So a rank without a GPU is
// an error on every rank.

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/error.h"

namespace tessera {

/// Error of a rank that sees no GPU.
class NoDeviceError : public CommError {
 public:
  using CommError::CommError;
};

struct DeviceReport {
  /// Identity of the host (comm/launch/host_process.h); "" if unknown.
  std::string host = {};
  /// Rank on the host, as its launcher says; -1 if unknown.
  int local_rank = -1;
  int wish = -1;        // requested by the program; -1: choose
  bool shares = false;  // may share its GPU (comm/nccl/nccl_options.h)
  /// Identities of visible GPUs, without spaces, equal for all ranks that see the same GPU.
  std::vector<std::string> devices = {};
  std::string reason = {};  // why no GPU is visible, in one line

  bool operator==(const DeviceReport&) const = default;
};

/// Returns the index of each rank's GPU among those it sees. It is the rank's wish, the only GPU, or the rank's number
/// on the host. That number is counted if the launcher does not tell, and wraps around if ranks share GPUs. Throws
/// NoDeviceError if a rank sees none, and ValueError if it sees too few or two ranks would share one that is not
/// shared, which NCCL rejects.
std::vector<int> choose_devices(const std::vector<DeviceReport>& reports);

/// Returns the reports of all ranks, which must all call it. Throws like the store on timeout.
std::vector<DeviceReport> exchange_reports(c10d::Store& store, int rank, int world_size, const DeviceReport& own);

}  // namespace tessera
