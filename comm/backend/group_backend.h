#pragma once
// Base of all backends of this library, which know their group besides c10d's rank and size.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"
#include "comm/context/flight_record.h"

namespace tessera {

/// Members of a group. `rank` is this rank's index in `ranks`, which are ranks of the default group.
struct GroupInfo {
  std::string name = {};
  std::vector<int64_t> ranks = {};
  int rank = 0;
  std::chrono::milliseconds timeout{0};
  std::string key = {};  // unique in the job, equal on all members

  int size() const { return static_cast<int>(ranks.size()); }
};

/// Result of c10d's calls.
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Longest timeout of a group. Longer ones would overflow the clock.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// Resolves the `timeout` of a work's wait(): kNoTimeout means the group's.
std::chrono::milliseconds resolve_timeout(std::chrono::milliseconds timeout, const GroupInfo& info);

/// Returns "group 'tp' (rank 1 of ranks [2, 3])", for errors.
std::string describe(const GroupInfo& info);

/// Throws ValueError, prefixed by `place`, unless `peer` is another rank of the group.
void check_peer(std::string_view place, int peer, const GroupInfo& info);

class GroupBackend : public c10d::Backend {
 public:
  explicit GroupBackend(GroupInfo info)
      : Backend(info.rank, info.size()), info_(std::make_shared<const GroupInfo>(std::move(info))) {}
  ~GroupBackend() override = default;

  const GroupInfo& info() const { return *info_; }
  /// Returns the group's index in `record`, that of the group's rank.
  uint32_t flight_group(FlightRecord& record) const;

  /// Gathers into one buffer, and copies to the listed tensors in wait().
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options = {}) override;

  /// Launches the calls one by one and returns one work. Throws ValueError unless the lists have one, nonzero length.
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;

  /// Returns whether the forms below, with segments instead of the tensor of all ranks, exist for `device`. Ranks may
  /// mix these and the plain forms.
  virtual bool supports_segments(c10::DeviceType /*device*/) const { return false; }
  /// Throws NotImplementedError unless supports_segments(). all_gather casts (check_written_segments()).
  virtual c10::intrusive_ptr<c10d::Work> all_gather_segments(TensorSegments outputs, const at::Tensor& input);
  /// Returns CPU zeros to all-gather from repeatedly, in memory that peers read directly if ranks share memory.
  virtual at::Tensor zeros_to_gather(int64_t numel, at::ScalarType dtype) const;
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_segments(const at::Tensor& output, TensorSegments inputs,
                                                                 ReduceOp op);

 protected:
  /// Returns the info for works, which may outlive the backend.
  const std::shared_ptr<const GroupInfo>& shared_info() const { return info_; }

 private:
  const std::shared_ptr<const GroupInfo> info_;
  mutable std::atomic<int64_t> flight_group_{-1};
};

/// A work whose wait() returns when outputs are ready, while peers may still read the input.
class ZeroCopyWork : public c10d::Work {
 public:
  using Work::Work;
  /// Returns, after wait(), when no rank reads the input any more. Throws like wait().
  virtual void wait_for_readers() = 0;
};

/// Returns the work if it is a ZeroCopyWork, otherwise null.
c10::intrusive_ptr<ZeroCopyWork> find_zero_copy(const c10::intrusive_ptr<c10d::Work>& work);

/// A stateless work that is complete at launch, so that a backend can return the same one repeatedly.
class CompletedWork : public c10d::Work {
 public:
  using Work::Work;
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  void synchronize() override {}
};

}  // namespace tessera
