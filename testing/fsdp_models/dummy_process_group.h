#pragma once
// A process group that knows its rank and size, and moves no data. For a default group without peers, see the "fake"
// backend.
// Source: DummyProcessGroup in torch/testing/_internal/common_fsdp.py.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace tessera::testing {

class DummyProcessGroup final : public c10d::Backend {
 public:
  DummyProcessGroup(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return "dummy"; }
  /// Leaves the tensors unchanged. The work is complete, and its future holds 1.
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options = {}) override;
};

}  // namespace tessera::testing
