#pragma once
// libtorch's NCCL work with this library's errors.

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/error.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// Returns the error of a failed collective, with the group, the timeout and `why`.
CommError nccl_error(const std::string& collective, const GroupInfo& info, const std::string& why);

/// Throws CommError if the watchdog has aborted the group.
void check_nccl_alive(const std::string& collective, const GroupInfo& info, c10d::ProcessGroupNCCL& nccl);

/// Work of a collective. Thread safety: like the work that it holds.
class NcclWork final : public c10d::Work {
 public:
  /// `finish`, if any, runs once, on the current stream of wait(), after the work.
  NcclWork(std::string collective, std::shared_ptr<const GroupInfo> info,
           c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl, c10::intrusive_ptr<c10d::Work> work,
           std::function<void()> finish = nullptr);

  /// Throws CommError on failure or timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Finishes the work, so that polling needs no wait().
  bool isCompleted() override;
  bool isSuccess() const override { return work_->isSuccess(); }
  void synchronize() override { wait(); }
  void abort() override { work_->abort(); }

 private:
  const std::string collective_;
  const std::shared_ptr<const GroupInfo> info_;
  const c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl_;
  const c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
};

}  // namespace tessera
