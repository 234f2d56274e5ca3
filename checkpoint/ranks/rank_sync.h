#pragma once
// Synchronizes the ranks of a save or load, and turns an error on one rank into an error on all. Internal to
// checkpoint. Thread safety: one thread at a time; a background thread needs a RankSync with a separate group.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/point_to_point.h"
#include "comm/process_group.h"

namespace tessera::dcp {

class RankSync {
 public:
  RankSync() = default;             // this rank alone
  static RankSync all();            // all ranks of the default group, or this rank alone without one
  RankSync with_own_group() const;  // the same ranks over a new group, for a background thread; collective

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Calls `step` and returns its results on all ranks, in rank order. Collective. If it throws on any rank, all throw
  /// an error of that type, or CheckpointError for std::filesystem's, with the number of the first such rank.
  std::vector<std::string> exchange(const std::function<std::string()>& step) const;
  void on_all_ranks(const std::function<void()>& step) const;              // exchange() for a step without result
  std::string from_rank0(const std::function<std::string()>& step) const;  // runs on rank 0; all get its result
  void on_rank0(const std::function<void()>& step) const;                  // from_rank0() for a step without result
  void broadcast_from_rank0(std::vector<int64_t>& numbers) const;          // of equal sizes on all ranks; collective

  /// Messages of host tensors between two ranks, in order (comm/point_to_point.h).
  void send(const at::Tensor& data, int to) const;
  Pending send_async(const at::Tensor& data, int to) const;
  void receive(const at::Tensor& data, int from) const;

 private:
  void broadcast_from_rank0(const at::Tensor& own) const;

  std::shared_ptr<const ProcessGroupPtr> group_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace tessera::dcp
