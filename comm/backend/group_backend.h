#pragma once
// What every backend of this library knows about its group, beside c10d's rank and size.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/tensor_segment.h"

namespace tessera {

/// Who is in a group. `rank` is this rank's place in `ranks`, which are ranks of the default group.
struct GroupInfo {
  std::string name = {};
  std::vector<int64_t> ranks = {};
  int rank = 0;
  std::chrono::milliseconds timeout{0};

  int size() const { return static_cast<int>(ranks.size()); }
};

/// What c10d's calls return.
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Longer time-outs are as good as none, and too long for the clock: groups have this one at most.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// What the `timeout` of a work's wait() means: the group's where it is kNoTimeout.
std::chrono::milliseconds resolve_timeout(std::chrono::milliseconds timeout, const GroupInfo& info);

/// "group 'tp' (rank 1 of ranks [2, 3])", for messages.
std::string describe(const GroupInfo& info);

/// Throws ValueError unless `peer` is another rank of the group. `place`: the caller, for the message.
void check_peer(std::string_view place, int peer, const GroupInfo& info);

class GroupBackend : public c10d::Backend {
 public:
  explicit GroupBackend(GroupInfo info)
      : Backend(info.rank, info.size()), info_(std::make_shared<const GroupInfo>(std::move(info))) {}
  ~GroupBackend() override = default;

  const GroupInfo& info() const { return *info_; }

  /// The list form: one flat gather, then a copy to each tensor of the list in wait().
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options = {}) override;

  /// The coalesced forms: the calls one by one, and one work for all. Lists of one length, not empty (ValueError).
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;

  /// Whether it has the following two for tensors on `device`, which are _allgather_base and _reduce_scatter_base with
  /// parts in place of the output of all ranks, and of the input for all ranks. Ranks that call one form and the other
  /// may meet.
  virtual bool supports_segments(c10::DeviceType /*device*/) const { return false; }
  /// Throw NotImplementedError unless supports_segments() for the tensors' device. all_gather casts
  /// (check_written_segments()).
  virtual c10::intrusive_ptr<c10d::Work> all_gather_segments(TensorSegments outputs, const at::Tensor& input);
  /// Zeros on the CPU, as input of many all_gather_segments(): where ranks share memory, in memory that they read
  /// directly.
  virtual at::Tensor zeros_to_gather(int64_t numel, at::ScalarType dtype) const;
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_segments(const at::Tensor& output, TensorSegments inputs,
                                                                 ReduceOp op);

 protected:
  /// For works, which may outlive the backend.
  const std::shared_ptr<const GroupInfo>& shared_info() const { return info_; }

 private:
  const std::shared_ptr<const GroupInfo> info_;
};

/// A work whose wait() returns when the outputs are there, while peers may still read the input.
class ZeroCopyWork : public c10d::Work {
 public:
  using Work::Work;
  /// Returns when nobody reads the input any more. Throws what wait() throws. After wait().
  virtual void wait_for_readers() = 0;
};

/// The work if it lends its input, else null.
c10::intrusive_ptr<ZeroCopyWork> find_zero_copy(const c10::intrusive_ptr<c10d::Work>& work);

/// A work that was complete when it was launched, without state: a backend hands the same one out again and again.
class CompletedWork : public c10d::Work {
 public:
  using Work::Work;
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { return true; }
  void synchronize() override {}
};

}  // namespace tessera
