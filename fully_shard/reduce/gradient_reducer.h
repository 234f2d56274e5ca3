#pragma once
// GradientReducer: reduces the gradients of a unit's parameters, or of a bucket of them (unit_gradients.h). Sends what
// reduce_scatter_layout.h says, and hands out views of one flat gradient (flat_gradient.h).
//
//   collect() → start() ──▶ reduce-scatter in flight ── start_all_reduce() ──▶ all-reduce in flight ── finish()
//
// - With streams, what follows a collective is on a lane (stream_lane.h), before whose drain() gradients are not read.
// - With offloading, finish() starts a copy to the host, and the next finish() waits for it.
// - Ranks that read each other's memory ("threads", "shm") reduce gradients in place, without copy-in.
// - With one shard, start() issues the all-reduce at once; start_in() instead copies into a buffer that several
//   reductions share and its owner all-reduces (reduction_queue.h).
//
// Thread safety: for the thread that runs the rank's backward.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "comm/backend/reduce_op.h"
#include "comm/backend/stream_event.h"
#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/events/sharded_state.h"
#include "fully_shard/layout/unit_context.h"
#include "fully_shard/memory/block_pool.h"
#include "fully_shard/memory/stream_lane.h"
#include "fully_shard/param/sharded_param.h"
#include "fully_shard/reduce/flat_gradient.h"
#include "fully_shard/reduce/reduce_scatter_layout.h"

namespace tessera {

/// Settings that a user may change from step to step.
struct GradientSettings {
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  std::optional<double> divide_factor = std::nullopt;
  bool force_sum = false;
  /// Sees this rank's reduced flat gradient before it is divided and handed out.
  std::function<void(const at::Tensor&)> all_reduce_hook = nullptr;
  /// Replace those of comm_overrides(), unless empty.
  ReduceScatterFn reduce_scatter = nullptr;
  AllReduceFn all_reduce = nullptr;
};

struct GradientScaleOptions {
  int64_t num_ranks = 1;  // over which the gradients are reduced, replicas included
  /// Divide the sum by it; none: by num_ranks, which is the average.
  std::optional<double> divide_factor = std::nullopt;
  /// Collectives only add; the division is a step of its own.
  bool force_sum = false;
  at::ScalarType reduce_dtype = at::kFloat;
};

/// gradient = reduce(gradients / before) / after, each collective reducing with `op`.
struct GradientScale {
  double before = 1;
  ReduceOp op = ReduceOp::Avg;
  double after = 1;
  bool operator==(const GradientScale&) const = default;
};

/// Divides after the reduction, which touches 1 / num_ranks of the elements. In float16 half of the factor comes
/// before, so that sums do not overflow: 24 is 8 before and 3 after. After _get_gradient_divide_factors in
/// torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
GradientScale gradient_scale(const GradientScaleOptions& options);

class GradientReducer {
 public:
  /// Sees every step that is taken.
  using Reporter = std::function<void(FSDPEventKind)>;

  /// `params` outlive it, and there is at least one.
  GradientReducer(std::span<ShardedParam> params, UnitContextPtr context, Reporter report);

  bool in_flight() const { return stage_ != Stage::Idle; }
  bool is_copying() const { return stage_ == Stage::HostCopy; }
  /// Returns whether a reduce-scatter's result waits for its all-reduce.
  bool has_partial() const { return partial_.defined(); }
  const UnitContext& context() const { return *context_; }
  const ReduceScatterLayout& layout() const { return layout_; }
  ReduceOp op() const { return current_.scale.op; }
  /// The lane on which finish() waits and works.
  const std::shared_ptr<StreamLane>& stream() const { return stream_; }

  /// Takes the unsharded gradients of trained parameters, which have one dtype. Returns whether there are such
  /// parameters; the rest is called only then. Collective, as every step here.
  bool collect(const GradientSettings& settings);
  /// Copies what was collected, and issues the first collective.
  void start(BlockPool& pool);
  /// Waits for the reduce-scatter. Returns true if an all-reduce is in flight then. Else calls finish(), or with
  /// replicas keeps the result for a later reduction.
  bool start_all_reduce();
  /// Returns when no peer reads the gradients that were sent. After start_all_reduce().
  void wait_for_readers() { scattered_.wait_for_readers(); }
  /// Waits, and gives the parameters their sharded gradients, in a second call if it is_copying() after the first.
  /// Throws StateError on every rank, on the CPU, if ranks froze different parameters.
  void finish();
  /// Waits, and discards the result and what earlier reductions left. A group that failed is no error here.
  void discard();

  /// Returns whether start_in() may take the place of start(). After collect().
  bool can_share() const;
  /// Copies what was collected to `buffer`, layout().numel() elements, which is all-reduced before finish().
  void start_in(const at::Tensor& buffer);

 private:
  enum class Stage { Idle, Collected, ReduceScatter, AllReduce, HostCopy };
  /// State of one reduction, from collect() to its end.
  struct Reduction {
    GradientSettings settings = {};   // with the functions of comm_overrides() in place of none
    bool has_own_all_reduce = false;  // the user's
    GradientScale scale = {};
    Pending pending = {};
    at::Tensor output = {};       // of the collectives
    at::Tensor host_output = {};  // while `output` is copied there
    StreamEvent copied = {};
  };

  bool all_reduces() const { return context_->axes.replica_axis && current_.settings.requires_all_reduce; }
  void plan();
  void make_buffers();
  void copy_in(const at::Tensor& buffer);
  void wait_for_pending();
  void leave_memory();
  const at::Tensor& choose_output(BlockPool& pool);
  void issue_reduce_scatter(BlockPool& pool);
  void end_reduce_scatter();
  void issue_all_reduce();
  void start_host_copy();
  void hand_out();
  void end();

  std::span<ShardedParam> params_;
  UnitContextPtr context_;
  Reporter report_;
  std::shared_ptr<StreamLane> scatter_stream_;
  std::shared_ptr<StreamLane> stream_;
  std::shared_ptr<CommOverrides> slots_ = comm_overrides();
  ReduceScatterLayout layout_;
  FlatGradient flat_gradient_;
  PooledBuffer input_, output_buffer_;

  Stage stage_ = Stage::Idle;
  Reduction current_;
  Pending scattered_;   // the last reduce-scatter, which was waited for
  at::Tensor partial_;  // sums of reduce-scatters that wait for an all-reduce
};

}  // namespace tessera
