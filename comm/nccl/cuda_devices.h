#pragma once
// Which GPU each rank takes, decided alike by all ranks from what all of them see.
//
//   rank   on host   number there   sees     takes
//   0      a         0              2 GPUs   0
//   1      a         1              2 GPUs   1
//   2      b         0              1 GPU    0      (a launcher that shows each process its own GPU)
//
// Each rank reports through the store; a pure function of all reports chooses, or says what is wrong. So a rank without
// a GPU is an error on every rank, and nobody waits for it.

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/error.h"

namespace tessera {

/// A rank sees no GPU.
class NoDeviceError : public CommError {
 public:
  using CommError::CommError;
};

struct DeviceReport {
  /// Equal for ranks of one host (comm/launch/host_process.h); "": cannot be told.
  std::string host = {};
  /// The rank's number there, as its launcher says; -1: not known.
  int local_rank = -1;
  /// What the program asks for; -1: choose.
  int wish = -1;
  /// Whether it may share its GPU (comm/nccl/nccl_options.h).
  bool shares = false;
  /// An identity for each visible GPU, equal for whoever sees the same one; without blanks.
  std::vector<std::string> devices = {};
  /// Why there are none. One line.
  std::string reason = {};

  bool operator==(const DeviceReport&) const = default;
};

/// The index of each rank's GPU among those that it sees: its wish, the only one, or its number on the host. That
/// number is counted where the launcher does not tell, and begins again at 0 where ranks share GPUs. Throws
/// NoDeviceError (a rank sees none), ValueError (it sees too few, or two ranks would share one, which NCCL refuses, and
/// one of them may not).
std::vector<int> choose_devices(const std::vector<DeviceReport>& reports);

/// The reports of all ranks; every rank calls it. Throws what the store throws at a time-out.
std::vector<DeviceReport> exchange_reports(c10d::Store& store, int rank, int world_size, const DeviceReport& own);

}  // namespace tessera
