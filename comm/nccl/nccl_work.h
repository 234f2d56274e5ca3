#pragma once
// libtorch's NCCL work with this library's errors.

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/error.h"
#include "comm/backend/group_backend.h"

namespace tessera {

/// A failed collective: on which group, the time-out, and `why`.
CommError nccl_error(const std::string& collective, const GroupInfo& info, const std::string& why);

/// Throws CommError where the watchdog has given the group up.
void check_nccl_alive(const std::string& collective, const GroupInfo& info, c10d::ProcessGroupNCCL& nccl);

/// Thread safety: as the work that it holds.
class NcclWork final : public c10d::Work {
 public:
  /// `finish`, if any, is called once, on the stream that is current in wait(), which waits for the work then.
  NcclWork(std::string collective, std::shared_ptr<const GroupInfo> info,
           c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl, c10::intrusive_ptr<c10d::Work> work,
           std::function<void()> finish = nullptr);

  /// Throws CommError where it failed or timed out.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Finishes it, since who polls need not wait.
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
