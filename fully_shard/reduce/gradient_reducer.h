#pragma once
// Reduces the gradients of a unit's parameters, or of a bucket of them (unit_gradients.h): one reduce-scatter over the
// shards of what all ranks send (reduce_scatter_layout.h), an all-reduce of the result over the replicas (HSDP,
// replicate), and each parameter's rows as views of one flat gradient (flat_gradient.h).
//
//   collect() → start() ──▶ reduce-scatter in flight ── start_all_reduce() ──▶ all-reduce in flight ── finish()
//
// On a device with streams copy-in is on the stream that computes, and what comes after a collective on another one
// (fully_shard/memory/stream_lane.h), until whose drain() the gradients are not to be read.
//
// Where gradients go from a device to the CPU, whose optimizer has them, finish() starts the copy, to pinned memory and
// on a stream of its own, and the next finish() waits for it.
//
// Where ranks read each other's memory ("threads", "shm") and the gradients are as they are sent, there is no copy-in:
// the reduce-scatter reads them where they are (comm/backend/tensor_segment.h). Where there is one shard only, start()
// copies into the result itself, and issues the all-reduce at once. In place of start(), start_in() copies into a part
// of a buffer that several reductions share, and the buffer's owner all-reduces it (reduction_queue.h).
//
// Where a hook of the user's reduces further, every parameter that requires a gradient gets one: the flags of its ranks
// do not come here.
//
// Thread safety: for the thread that runs the rank's backward.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "comm/backend/stream_event.h"
#include "fully_shard/events/comm_overrides.h"
#include "fully_shard/events/sharded_state.h"
#include "fully_shard/layout/unit_context.h"
#include "fully_shard/memory/block_pool.h"
#include "fully_shard/memory/stream_lane.h"
#include "fully_shard/param/sharded_param.h"
#include "fully_shard/reduce/flat_gradient.h"
#include "fully_shard/reduce/gradient_scale.h"
#include "fully_shard/reduce/reduce_scatter_layout.h"

namespace tessera {

/// What a user may change from step to step.
struct GradientSettings {
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  std::optional<double> divide_factor = std::nullopt;
  bool force_sum = false;
  /// Called with this rank's reduced flat gradient before it is divided and handed out.
  std::function<void(const at::Tensor&)> all_reduce_hook = nullptr;
  /// In place of the slots'; empty: those.
  ReduceScatterFn reduce_scatter = nullptr;
  AllReduceFn all_reduce = nullptr;
};

class GradientReducer {
 public:
  /// Sees every step that is taken.
  using Reporter = std::function<void(FSDPEventKind)>;

  /// `params` outlive it, and there is at least one.
  GradientReducer(std::span<ShardedParam> params, UnitContextPtr context, Reporter report);

  bool has_trainable() const;
  bool in_flight() const { return stage_ != Stage::Idle; }
  bool is_copying() const { return stage_ == Stage::HostCopy; }
  /// Takes the unsharded gradients of the parameters that require one, which have one dtype. Returns whether there is
  /// such a parameter; the rest is called only then. Collective, as every step here.
  bool collect(const GradientSettings& settings);
  /// Copies what was collected, and issues the first collective.
  void start(BlockPool& pool);
  /// Waits for the reduce-scatter. With replicas it issues the all-reduce, if start() did not, and returns true, unless
  /// the settings said not to: then the result waits for a later reduction. Without replicas it calls finish().
  bool start_all_reduce();
  /// Once that has happened: returns when no peer reads the gradients that the reduce-scatter sent, which are kept
  /// until then.
  void wait_for_readers() { scattered_.wait_for_readers(); }
  /// Waits, and gives the parameters their sharded gradients. The first of two calls where they go to the host, after
  /// which it is_copying(). On the CPU it throws StateError on every rank, and has dropped the gradients, if ranks
  /// froze different parameters.
  void finish();
  /// Waits, and throws the result away, with what earlier reductions left to be all-reduced. A group that has failed is
  /// no error here.
  void discard();

  /// Once collected: whether start_in() may take the place of start().
  bool can_share() const;
  /// Whether both can be in one all-reduce.
  bool can_share_with(const GradientReducer& other) const;
  int64_t numel() const { return message_.numel(); }
  const at::TensorOptions& buffer_options() const { return message_.options(); }
  ReduceOp op() const { return current_.scale.op; }
  /// On which finish() waits and works.
  const std::shared_ptr<StreamLane>& stream() const { return stream_; }
  const ProcessGroupPtr& replica_group() const { return context_->axes.replica_group(); }
  /// Copies what was collected to `buffer`, numel() elements of buffer_options(), which stays until finish(). finish()
  /// comes after the all-reduce of it.
  void start_in(const at::Tensor& buffer);

  /// Whether a reduce-scatter's result waits for its all-reduce.
  bool has_partial() const { return partial_.defined(); }

 private:
  enum class Stage { Idle, Collected, ReduceScatter, AllReduce, HostCopy };
  /// State of one reduction, from collect() to its end.
  struct Reduction {
    GradientSettings settings = {};   // the slots' functions in place of none
    bool has_own_all_reduce = false;  // the user's
    GradientScale scale = {};
    Pending pending = {};
    at::Tensor output = {};       // of the collectives
    at::Tensor host_output = {};  // while `output` is copied there
    StreamEvent copied = {};
  };

  bool all_reduces() const { return context_->axes.replica_axis && current_.settings.requires_all_reduce; }
  void plan();
  void copy_in(const at::Tensor& buffer);
  void wait_for_pending();
  void leave_memory();
  const at::Tensor& choose_output(BlockPool& pool);
  void issue_reduce_scatter(BlockPool& pool);
  void end_reduce_scatter();
  void keep_partial();
  void issue_all_reduce();
  void scale_result();
  void start_host_copy();
  void check_frozen_alike();
  void hand_out();
  void end();

  std::span<ShardedParam> params_;
  UnitContextPtr context_;
  Reporter report_;
  std::shared_ptr<StreamLane> scatter_stream_;
  std::shared_ptr<StreamLane> stream_;
  std::shared_ptr<CommOverrides> slots_ = comm_overrides();
  ReduceScatterLayout message_;
  FlatGradient flat_gradient_;
  PooledBuffer input_, output_buffer_;

  Stage stage_ = Stage::Idle;
  Reduction current_;
  Pending scattered_;   // the last reduce-scatter, which was waited for
  at::Tensor partial_;  // sums of reduce-scatters that wait for an all-reduce
};

}  // namespace tessera
