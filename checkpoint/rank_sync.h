#pragma once
// The ranks that save or load together, and how a fault of one becomes an error of all.
//
//   RankSync ranks = RankSync::all();
//   std::vector<std::string> texts = ranks.exchange([&] { return describe(own_tensors); });
//
// Thread safety: for one thread at a time; a background thread has a RankSync over a group of its own.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera::dcp {

class RankSync {
 public:
  /// This rank alone.
  RankSync() = default;
  /// All ranks of the default group; this one alone where there is no group.
  static RankSync all();
  /// The same ranks over a new group, for a background thread. Collective.
  RankSync with_own_group() const;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Calls `step` and returns what it returned on every rank, in their order. Where it threw on any rank, all of them
  /// throw that exception's type (CheckpointError where the file system refused something), the first such rank's text
  /// and its number. Collective.
  std::vector<std::string> exchange(const std::function<std::string()>& step) const;
  /// The same, for a step that has no result.
  void on_all_ranks(const std::function<void()>& step) const;
  /// Calls `step` on rank 0 and returns what it returned on all ranks. Where it throws, all do, as of exchange().
  std::string from_rank0(const std::function<std::string()>& step) const;
  /// The same, for a step that has no result.
  void on_rank0(const std::function<void()>& step) const;
  /// numbers = those of rank 0, of which every rank knows how many there are. Collective.
  void copy_from_first(std::vector<int64_t>& numbers) const;

 private:
  void copy_from_first(const at::Tensor& own) const;

  std::shared_ptr<const ProcessGroupPtr> group_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace tessera::dcp
