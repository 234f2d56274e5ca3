#pragma once
// The reduction of a unit's gradients: copy-in of all gradients into one buffer that is laid out as the flat shards
// are, one reduce-scatter over the shards, an all-reduce of the result over the replicas (HSDP, replicate), and each
// parameter's rows as views of one flat gradient.
//
//   collect() → start() ──▶ reduce-scatter in flight ── start_all_reduce() ──▶ all-reduce in flight ── finish()
//
// On a device with streams copy-in is on the stream that computes, and what comes after a collective on another one
// (fully_shard/reduce_stream.h), until whose drain() the gradients are not to be read.
//
// Where gradients go from a device to the CPU, whose optimizer has them, finish() starts the copy, to pinned memory and
// on a stream of its own, and the next finish() waits for it.
//
// Where ranks read each other's memory ("threads", "shm") and the gradients are as they are sent, there is no copy-in:
// the reduce-scatter reads them where they are (comm/tensor_part.h). Where there is one shard only, start() copies into
// the result itself, and issues the all-reduce at once. In place of start(), start_in() copies into a part of a buffer
// that several reductions share, and whoever owns that buffer all-reduces it (reduction_queue.h).
//
// Beside the gradients each rank sends one flag a parameter: whether it has a gradient at all. Their sum tells
// every rank which parameters were used by some rank, so that a parameter that only some ranks used gets the
// average with zeros for the others, and one that none used keeps an undefined gradient (the optimizer then
// leaves it alone, as in one process). The collective's size never depends on what was used, so ranks that
// use different parameters cannot disagree on it (compare pytorch issue 170667). Where a hook of the user's reduces
// further, every parameter that requires a gradient gets one: its ranks' flags do not come here.
//
// The flat gradient and its DTensors are kept from step to step, and used again once nobody else refers to them
// (after zero_grad()): the reduce-scatter then writes the gradients where they stay.
//
// Thread safety: for the thread that runs the rank's backward.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "comm/stream_mark.h"
#include "fully_shard/block_pool.h"
#include "fully_shard/data_parallel_axes.h"
#include "fully_shard/engine_slots.h"
#include "fully_shard/gradient_scale.h"
#include "fully_shard/param_layout.h"
#include "fully_shard/reduce_stream.h"
#include "fully_shard/sharded_param.h"

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

class GradientReduction {
 public:
  struct Options {
    std::string api;  // as in ParamGroup::Options
    DataParallelAxes axes;
    std::optional<at::ScalarType> reduce_dtype;  // none: that of the parameters
    at::Device device;                           // of the unsharded parameters
    at::TensorOptions grad_options;              // of the sharded gradients, but for their dtype: the parameters'
    std::vector<int64_t> dims;                   // that are sharded, one a parameter
  };

  explicit GradientReduction(Options options);

  bool in_flight() const { return stage_ != Stage::Idle; }
  bool is_all_reducing() const { return stage_ == Stage::AllReduce; }
  bool is_copying() const { return stage_ == Stage::HostCopy; }
  /// Takes the unsharded gradients of the parameters that require one, which have one dtype. Collective, as every step
  /// here.
  void collect(std::span<ShardedParam> params, const GradientSettings& settings);
  /// Copies what was collected, and issues the first collective.
  void start(std::span<ShardedParam> params, BlockPool& pool);
  /// Waits for the reduce-scatter. With replicas it issues the all-reduce, if start() did not, and returns true, unless
  /// the settings said not to: then the result waits for a later reduction. Without replicas it calls finish().
  bool start_all_reduce(std::span<ShardedParam> params);
  /// Once that has happened: returns when no peer reads the gradients that the reduce-scatter sent, which are kept
  /// until then.
  void wait_until_read() { scattered_.wait_until_read(); }
  /// Waits, and gives the parameters their sharded gradients. The first of two calls where they go to the host, after
  /// which it is_copying().
  void finish(std::span<ShardedParam> params);
  /// Waits, and throws the result away, with what earlier reductions left to be all-reduced. A group that has failed is
  /// no error here.
  void discard();

  /// Once collected: whether start_in() may take the place of start().
  bool can_share() const;
  /// Whether both can be in one all-reduce.
  bool can_share_with(const GradientReduction& other) const;
  int64_t numel() const { return numel_; }
  at::TensorOptions buffer_options() const;
  ReduceOp op() const { return scale_.op; }
  /// On which finish() waits and works.
  const std::shared_ptr<ReduceStream>& stream() const { return stream_; }
  const ProcessGroupPtr& replica_group() const { return options_.axes.replica_group(); }
  /// Copies what was collected to `buffer`, numel() elements of buffer_options(), which stays until finish(). finish()
  /// comes after the all-reduce of it.
  void start_in(const at::Tensor& buffer);

  /// Whether a reduce-scatter's result waits for its all-reduce.
  bool has_partial() const { return partial_.defined(); }

 private:
  enum class Stage { Idle, Collected, ReduceScatter, AllReduce, HostCopy };

  /// A flat gradient and one DTensor a parameter over it.
  struct FlatGrad {
    at::Tensor flat;
    std::vector<at::Tensor> grads;
    bool is_free() const;
  };

  void plan(std::span<const ShardedParam> params);
  void copy_in(const at::Tensor& buffer);
  bool can_send_in_place() const;
  TensorParts gradient_parts();
  void write_flags(const at::Tensor& buffer, int64_t offset, int64_t stride) const;
  std::vector<bool> used_members() const;
  bool is_flat_grad(std::span<const ShardedParam> params) const;
  const at::Tensor& choose_output(std::span<const ShardedParam> params, BlockPool& pool);
  void ensure_flat_grad(std::span<const ShardedParam> params);
  void write_back(std::span<ShardedParam> params);
  bool adds_up_flat(std::span<const ShardedParam> params, const std::vector<bool>& used) const;
  void end_reduce_scatter();
  void keep_partial();
  void issue_all_reduce();
  void scale_result();
  void start_host_copy(std::span<const ShardedParam> params);
  void end();

  Options options_;
  std::shared_ptr<ReduceScatterStream> scatter_stream_;
  std::shared_ptr<ReduceStream> stream_;
  std::shared_ptr<EngineSlots> slots_ = engine_slots();
  std::vector<bool> trainable_;  // the parameters for which the plan below was made
  std::vector<size_t> members_;  // their places among the unit's parameters
  at::TensorOptions grad_options_;
  at::ScalarType reduce_dtype_ = at::kFloat;
  ParamLayout layout_;
  int64_t numel_ = 0;  // of a rank's part: gradients and flags
  std::vector<std::vector<BlockCopy>> copies_;
  std::vector<FlatRange> unused_;
  PooledBuffer input_, output_buffer_;
  bool group_takes_parts_ = false;  // and the gradients lie as parts do
  at::Tensor flags_;                // for all ranks, where gradients are sent in place

  Stage stage_ = Stage::Idle;
  Pending pending_;
  Pending scattered_;  // the last reduce-scatter, which was waited for
  GradientScale scale_;
  bool all_reduces_ = false;
  std::function<void(const at::Tensor&)> hook_;
  ReduceScatterFn reduce_scatter_;
  AllReduceFn all_reduce_;
  bool has_own_all_reduce_ = false;  // the user's
  std::vector<at::Tensor> grads_;    // of the members, collected
  std::vector<bool> has_grad_;       // which members had one on this rank
  at::Tensor output_;                // what the collectives write
  at::Tensor host_output_;           // while it is copied there
  StreamMark copied_;
  at::Tensor partial_;  // sums of reduce-scatters that wait for an all-reduce
  FlatGrad flat_grad_;
};

}  // namespace tessera
