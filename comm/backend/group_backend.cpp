#include "comm/backend/group_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>

#include "base/error.h"
#include "comm/backend/backend_checks.h"

namespace tessera {

namespace {

class ListGatherWork final : public c10d::Work {
 public:
  ListGatherWork(c10::intrusive_ptr<c10d::Work> gather, at::Tensor flat, std::vector<at::Tensor> outputs)
      : gather_(std::move(gather)), flat_(std::move(flat)), outputs_(std::move(outputs)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (!is_written_) {
      gather_->wait(timeout);
      for (size_t rank = 0; rank < outputs_.size(); ++rank) {
        outputs_[rank].copy_(flat_[static_cast<int64_t>(rank)].view(outputs_[rank].sizes()));
      }
      is_written_ = true;
    }
    return true;
  }
  /// Writes the outputs, since polling needs no wait().
  bool isCompleted() override {
    if (!is_written_ && !gather_->isCompleted()) {
      return false;
    }
    try {
      wait();
    } catch (const std::exception&) {  // completed without success; wait() reports why
    }
    return true;
  }
  bool isSuccess() const override { return is_written_; }
  void synchronize() override { wait(); }

 private:
  const c10::intrusive_ptr<c10d::Work> gather_;
  const at::Tensor flat_;
  const std::vector<at::Tensor> outputs_;
  bool is_written_ = false;
};

using Works = std::vector<WorkPtr>;

class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(Works works) : works_(std::move(works)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    for (const auto& work : works_) {
      work->wait(timeout);
    }
    return true;
  }
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
  }
  void synchronize() override {
    for (const auto& work : works_) {
      work->synchronize();
    }
  }

 private:
  const Works works_;
};

void check_lists(const char* place, const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  TESSERA_CHECK(ValueError, !outputs.empty() && outputs.size() == inputs.size(),
                "{}: {} outputs and {} inputs; lists of one length are needed", place, outputs.size(), inputs.size());
}

}  // namespace

std::chrono::milliseconds resolve_timeout(std::chrono::milliseconds timeout, const GroupInfo& info) {
  return std::min(timeout == kNoTimeout ? info.timeout : timeout, kLongestTimeout);
}

std::string describe(const GroupInfo& info) {
  return fmt::format("group '{}' (rank {} of ranks [{}])", info.name, info.rank, fmt::join(info.ranks, ", "));
}

void check_peer(std::string_view place, int peer, const GroupInfo& info) {
  TESSERA_CHECK(ValueError, peer >= 0 && peer < info.size() && peer != info.rank,
                "{}: peer {} of {}; another rank of the group is needed, of 0 to {} and not {}", place, peer,
                describe(info), info.size() - 1, info.rank);
}

// If two threads get here first, the group exists twice, which only splits its sums.
uint32_t GroupBackend::flight_group(FlightRecord& record) const {
  int64_t index = flight_group_.load(std::memory_order_relaxed);
  if (index < 0) {
    index = record.add_group({.name = info_->name, .key = info_->key, .rank = info_->rank, .size = info_->size()});
    flight_group_.store(index, std::memory_order_relaxed);
  }
  return static_cast<uint32_t>(index);
}

c10::intrusive_ptr<c10d::Work> GroupBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                       std::vector<at::Tensor>& inputs,
                                                       const c10d::AllgatherOptions& options) {
  at::Tensor input = only_tensor("allgather", inputs);
  TESSERA_CHECK(ValueError, outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(getSize()),
                "allgather: one list of {} outputs is needed", getSize());
  for (const at::Tensor& output : outputs[0]) {
    TESSERA_CHECK(ValueError, output.numel() == input.numel() && output.scalar_type() == input.scalar_type(),
                  "allgather: outputs must have the input's size {} and dtype", input.numel());
  }
  at::Tensor flat = at::empty({getSize(), input.numel()}, input.options());
  auto gather = _allgather_base(flat, input, options);
  return c10::make_intrusive<ListGatherWork>(std::move(gather), std::move(flat), outputs[0]);
}

c10::intrusive_ptr<c10d::Work> GroupBackend::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                                 const c10d::AllreduceCoalescedOptions& options) {
  check_lists("allreduce_coalesced", tensors, tensors);
  Works works;
  for (const at::Tensor& tensor : tensors) {
    std::vector<at::Tensor> one = {tensor};
    works.push_back(allreduce(one, options));
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

c10::intrusive_ptr<c10d::Work> GroupBackend::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                             std::vector<at::Tensor>& inputs,
                                                                             const c10d::AllgatherOptions& options) {
  check_lists("allgather_into_tensor_coalesced", outputs, inputs);
  Works works;
  for (size_t i = 0; i < outputs.size(); ++i) {
    works.push_back(_allgather_base(outputs[i], inputs[i], options));
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

c10::intrusive_ptr<c10d::Work> GroupBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  check_lists("reduce_scatter_tensor_coalesced", outputs, inputs);
  Works works;
  for (size_t i = 0; i < outputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return c10::make_intrusive<CoalescedWork>(std::move(works));
}

c10::intrusive_ptr<c10d::Work> GroupBackend::all_gather_segments(TensorSegments, const at::Tensor&) {
  TESSERA_CHECK(NotImplementedError, false, "all_gather into parts: backend {} does not take any", getBackendName());
}

at::Tensor GroupBackend::zeros_to_gather(int64_t numel, at::ScalarType dtype) const {
  return at::zeros({numel}, dtype);
}

c10::intrusive_ptr<c10d::Work> GroupBackend::reduce_scatter_segments(const at::Tensor&, TensorSegments, ReduceOp) {
  TESSERA_CHECK(NotImplementedError, false, "reduce_scatter of parts: backend {} does not take any", getBackendName());
}

c10::intrusive_ptr<ZeroCopyWork> find_zero_copy(const c10::intrusive_ptr<c10d::Work>& work) {
  // c10's dynamic_intrusive_pointer_cast leaks on failure.
  auto* const zero_copy = dynamic_cast<ZeroCopyWork*>(work.get());
  return zero_copy ? c10::intrusive_ptr<ZeroCopyWork>::reclaim_copy(zero_copy) : nullptr;
}

}  // namespace tessera
