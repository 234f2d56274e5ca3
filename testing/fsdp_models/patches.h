#pragma once
// Scoped replacements of fully_shard's communication and transitions, for tests that count collectives, inspect their
// inputs, or record the order of events.
//
//   run_ranks(2, [](int) {
//     int gathers = 0;
//     const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
//                                             const at::Tensor& input, const ProcessGroupPtr& group) {
//       ++gathers;
//       return original(output, input, group);
//     });
//     model(batch);                                     // its units gather by the function above
//     expect_equal(gathers, 3);
//   });                                                 // the original is back
//
//   const auto patch = patch_reduce_scatter(std::bind_front(reduce_scatter_with_assert, [](const at::Tensor& output) {
//     TESSERA_EXPECT(output.scalar_type() == at::kBFloat16);
//   }));
//
// A guard reads the current function, waits for all ranks of the default group (barrier), and installs its own; its
// destructor waits for all ranks again and restores the previous one. So no two ranks communicate by different
// functions. All ranks make and destroy the same guards in the same order; guards nest. Each rank's replacement is its
// own, so captures need no lock. A guard destroyed by an exception does not wait, and a failure of its last barrier is
// only a warning.
// Thread safety: for the thread that runs the rank's forward and backward.
// Source: the patch_* helpers of torch/testing/_internal/common_fsdp.py.

#include <functional>
#include <memory>

#include "fully_shard/events/comm_overrides.h"

namespace tessera {

/// An active replacement, which ends with its scope.
class [[nodiscard]] Patch {
 public:
  using Install = std::function<void(CommOverrides&)>;
  /// Calls `install`, and restores the calling rank's `slots` on destruction. All ranks must call it.
  explicit Patch(const Install& install);
  ~Patch();
  Patch(const Patch&) = delete;
  Patch& operator=(const Patch&) = delete;

 private:
  std::shared_ptr<CommOverrides> slots_;
  CommOverrides former_;
  int exceptions_;
};

/// Types of replacements, whose first argument is the function that they replace.
Patch patch_all_gather(std::function<Pending(const AllGatherFn& original, const at::Tensor& output,
                                             const at::Tensor& input, const ProcessGroupPtr& group)>
                           replacement);
Patch patch_reduce_scatter(std::function<Pending(const ReduceScatterFn& original, const at::Tensor& output,
                                                 const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group)>
                               replacement);
Patch patch_all_reduce(std::function<Pending(const AllReduceFn& original, const at::Tensor& tensor, ReduceOp op,
                                             const ProcessGroupPtr& group)>
                           replacement);

/// Steps of units (fully_shard/events/comm_overrides.h). call.run() is the original; a replacement without it skips the
/// step.
Patch patch_unshard(UnitSlot replacement);
Patch patch_reshard(UnitSlot replacement);
Patch patch_post_backward(UnitSlot replacement);

/// For patch_reduce_scatter: passes the output to `check`, for its dtype, sizes and device, then reduces. Values are
/// not set yet.
Pending reduce_scatter_with_assert(const std::function<void(const at::Tensor& output)>& check,
                                   const ReduceScatterFn& original, const at::Tensor& output, const at::Tensor& input,
                                   ReduceOp op, const ProcessGroupPtr& group);

}  // namespace tessera
