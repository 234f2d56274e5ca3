#pragma once
// Scoped replacements of what fully_shard communicates and does: for tests that count collectives, look at what goes
// into them, or record the order of events.
//
//   run_ranks(2, [](int) {
//     int gathers = 0;
//     const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
//                                             const at::Tensor& input, const ProcessGroupPtr& group) {
//       ++gathers;
//       return original(output, input, group);
//     });
//     model(batch);                                     // its units gather through the function above
//     expect_equal(gathers, 3);
//   });                                                 // the patch ends: the original is back
//
//   const auto patch = patch_reduce_scatter(std::bind_front(reduce_scatter_with_assert, [](const at::Tensor& output) {
//     TESSERA_EXPECT(output.scalar_type() == at::kBFloat16);
//   }));
//
// A guard reads the present function, waits for all ranks of the default group (barrier), and installs its own; its end
// waits for all ranks again and puts the former back. So no rank communicates by one function while a peer still, or
// already, uses the other. All ranks make and end the same guards in the same order; guards nest. Each rank's
// replacement is its own, so what it captures needs no lock.
//
// A guard that ends because of an exception does not wait for its peers, and the failure of a barrier at its end
// becomes a warning: destructors do not throw.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// After the patch_* helpers of torch/testing/_internal/common_fsdp.py.

#include <functional>
#include <memory>

#include "fully_shard/events/comm_overrides.h"

namespace tessera {

/// A replacement in force. It ends with its scope.
class [[nodiscard]] Patch {
 public:
  using Install = std::function<void(CommOverrides&)>;
  /// Installs by `install`, and at its end puts back `slots` as they were: of the calling rank. Collective.
  explicit Patch(const Install& install);
  ~Patch();
  Patch(const Patch&) = delete;
  Patch& operator=(const Patch&) = delete;

 private:
  std::shared_ptr<CommOverrides> slots_;
  CommOverrides former_;
  int exceptions_;
};

/// Replacements get the function that they replace first.
Patch patch_all_gather(std::function<Pending(const AllGatherFn& original, const at::Tensor& output,
                                             const at::Tensor& input, const ProcessGroupPtr& group)>
                           replacement);
Patch patch_reduce_scatter(std::function<Pending(const ReduceScatterFn& original, const at::Tensor& output,
                                                 const at::Tensor& input, ReduceOp op, const ProcessGroupPtr& group)>
                               replacement);
Patch patch_all_reduce(std::function<Pending(const AllReduceFn& original, const at::Tensor& tensor, ReduceOp op,
                                             const ProcessGroupPtr& group)>
                           replacement);

/// Steps of units (fully_shard/events/comm_overrides.h). call.run() is the original; a replacement that does not call
/// it leaves the step out.
Patch patch_unshard(UnitSlot replacement);
Patch patch_reshard(UnitSlot replacement);
Patch patch_post_backward(UnitSlot replacement);

/// For patch_reduce_scatter: shows `check` the output, for its dtype, sizes and device, then reduces. The values are
/// not there yet.
Pending reduce_scatter_with_assert(const std::function<void(const at::Tensor& output)>& check,
                                   const ReduceScatterFn& original, const at::Tensor& output, const at::Tensor& input,
                                   ReduceOp op, const ProcessGroupPtr& group);

}  // namespace tessera
