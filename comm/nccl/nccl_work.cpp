#include "comm/nccl/nccl_work.h"

#include <utility>

namespace tessera {

CommError nccl_error(const std::string& collective, const GroupInfo& info, const std::string& why) {
  return CommError(fmt::format("{} on {}: a peer left, called something else, or did not arrive within {} ms: {}",
                               collective, describe(info), info.timeout.count(), why));
}

void check_nccl_alive(const std::string& collective, const GroupInfo& info, c10d::ProcessGroupNCCL& nccl) {
  const c10d::ErrorType error = nccl.getError();
  if (error != c10d::ErrorType::SUCCESS) {
    throw nccl_error(collective, info,
                     error == c10d::ErrorType::TIMEOUT ? "a collective timed out, and the group was aborted"
                                                       : "NCCL failed, and the group was aborted");
  }
}

NcclWork::NcclWork(std::string collective, std::shared_ptr<const GroupInfo> info,
                   c10::intrusive_ptr<c10d::ProcessGroupNCCL> nccl, c10::intrusive_ptr<c10d::Work> work,
                   std::function<void()> finish)
    : collective_(std::move(collective)),
      info_(std::move(info)),
      nccl_(std::move(nccl)),
      work_(std::move(work)),
      finish_(std::move(finish)) {}

bool NcclWork::wait(std::chrono::milliseconds timeout) {
  try {
    work_->wait(timeout);
  } catch (const std::exception& failure) {
    throw nccl_error(collective_, *info_, failure.what());
  }
  check_nccl_alive(collective_, *info_, *nccl_);
  if (const auto finish = std::exchange(finish_, nullptr)) {
    finish();
  }
  return true;
}

bool NcclWork::isCompleted() {
  const bool is_completed = work_->isCompleted();
  if (is_completed && finish_) {
    try {
      wait();
    } catch (const CommError&) {  // completed without success; wait() reports why
    }
  }
  return is_completed;
}

}  // namespace tessera
