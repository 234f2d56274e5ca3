#pragma once
// GradientReducer: reduces the gradients of a unit, or of a bucket of its parameters (unit_gradients.h). It sends the
// data described in reduce_scatter_layout.h and hands out views of one flat gradient (flat_gradient.h).
//
//   collect() → start() ──▶ reduce-scatter in flight ── start_all_reduce() ──▶ all-reduce in flight ── finish()
//
// - With streams, work after a collective runs on a lane (stream_lane.h). Do not read gradients before its drain().
// - With offloading, finish() starts a copy to the host, and the next finish() waits for it.
// - Ranks that can read each other's memory ("threads", "shm") reduce gradients in place, without copy-in.
// - With one shard, start() issues the all-reduce at once. Alternatively, start_in() copies into a buffer that several
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

/// Settings that the user may change between iterations.
struct GradientSettings {
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  std::optional<double> divide_factor = std::nullopt;
  bool force_sum = false;
  /// Receives this rank's reduced flat gradient before it is divided and handed out.
  std::function<void(const at::Tensor&)> all_reduce_hook = nullptr;
  /// Replace the functions of comm_overrides(), unless empty.
  ReduceScatterFn reduce_scatter = nullptr;
  AllReduceFn all_reduce = nullptr;
};

struct GradientScaleOptions {
  int64_t num_ranks = 1;  // number of ranks in the reduction, including replicas
  /// Divisor of the sum. Default: num_ranks, for the average.
  std::optional<double> divide_factor = std::nullopt;
  /// Restricts collectives to sums, followed by a separate division.
  bool force_sum = false;
  at::ScalarType reduce_dtype = at::kFloat;
};

/// Scaling of gradients: gradient = reduce(gradients / before) / after, where each collective reduces with `op`.
struct GradientScale {
  double before = 1;
  ReduceOp op = ReduceOp::Avg;
  double after = 1;
  bool operator==(const GradientScale&) const = default;
};

/// Returns the scaling. It divides after the reduction, when only 1 / num_ranks of the elements remain. In float16, it
/// divides partly before it so that sums do not overflow: 24 becomes 8 before and 3 after. Source:
/// _get_gradient_divide_factors in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
GradientScale gradient_scale(const GradientScaleOptions& options);

class GradientReducer {
 public:
  /// Receives every event.
  using Reporter = std::function<void(FSDPEventKind)>;

  /// `params` must outlive this and must not be empty.
  GradientReducer(std::span<ShardedParam> params, UnitContextPtr context, Reporter report);

  bool in_flight() const { return stage_ != Stage::Idle; }
  bool is_copying() const { return stage_ == Stage::HostCopy; }
  /// Returns whether the result of a reduce-scatter is waiting for its all-reduce.
  bool has_partial() const { return partial_.defined(); }
  const UnitContext& context() const { return *context_; }
  const ReduceScatterLayout& layout() const { return layout_; }
  ReduceOp op() const { return current_.scale.op; }
  /// Returns the lane on which finish() waits and works.
  const std::shared_ptr<StreamLane>& stream() const { return stream_; }

  /// Takes the unsharded gradients of trained parameters, which have one dtype. Returns whether there are such
  /// parameters; only then call the other steps. Collective, like every step.
  bool collect(const GradientSettings& settings);
  /// Copies the collected gradients and issues the first collective.
  void start(BlockPool& pool);
  /// Waits for the reduce-scatter. Returns true if an all-reduce is now in flight. Otherwise calls finish(), or with
  /// replicas keeps the result for a later reduction.
  bool start_all_reduce();
  /// Waits until no peer reads the sent gradients. Call after start_all_reduce().
  void wait_for_readers() { scattered_.wait_for_readers(); }
  /// Waits, and sets the parameters' sharded gradients; in a second call if is_copying() after the first. On the CPU,
  /// throws StateError on every rank if ranks froze different parameters.
  void finish();
  /// Waits, and discards the result and remains of earlier reductions. Ignores a failure of the group.
  void discard();

  /// Returns whether start_in() may replace start(). Call after collect().
  bool can_share() const;
  /// Copies the collected gradients to `buffer`, which has layout().numel() elements and is all-reduced before
  /// finish().
  void start_in(const at::Tensor& buffer);

 private:
  enum class Stage { Idle, Collected, ReduceScatter, AllReduce, HostCopy };
  /// State of one reduction, from collect() to its end.
  struct Reduction {
    GradientSettings settings = {};   // empty functions replaced by those of comm_overrides()
    bool has_own_all_reduce = false;  // whether the user replaced it
    GradientScale scale = {};
    Pending pending = {};
    at::Tensor output = {};       // result of the collectives
    at::Tensor host_output = {};  // copy of `output`, while in progress
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
  Pending scattered_;   // the last reduce-scatter, after waiting for it
  at::Tensor partial_;  // sums of reduce-scatters that wait for an all-reduce
};

}  // namespace tessera
