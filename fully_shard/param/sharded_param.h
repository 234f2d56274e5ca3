#pragma once
// ShardedParam: one parameter of a fully_shard unit and its two states.
//
//   sharded     a DTensor, Shard(dim) over the sharding axis (with tensor parallelism over both meshes,
//   stacked_spec.h),
//               whose local tensor is this rank's part of the unit's flat shard. The optimizer sees this.
//   unsharded   a plain tensor with all rows, in the compute dtype; with tensor parallelism a DTensor on its mesh. Its
//               memory exists only in this state, or is that of the shard: one rank has all rows, and nothing is cast.
//
// What set_data does switches the *same* TensorImpl between the two, so module members, parameters() and optimizers
// stay valid. Views that autograd saved share the unsharded storage, so that stays and only its bytes come and go. The
// vocabulary follows [Note: FSDP tensors] in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
//
// Thread safety: for the thread that runs the rank's forward and backward.

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

#include "dtensor/local/dtensor_impl.h"
#include "fully_shard/layout/flat_layout.h"
#include "fully_shard/layout/unit_context.h"
#include "fully_shard/memory/block_pool.h"

namespace tessera {

struct ParamInfo {
  at::Tensor tensor;
  std::shared_ptr<const ParameterOrigin> origin;
  int64_t shard_dim = 0;
  SpecPtr tp_spec = nullptr;  // where tensor parallelism put it; null for a plain tensor
  GatherItem gather;          // how it is sent, and computed with

  /// Sizes of what one rank has of it while it is unsharded.
  at::IntArrayRef unsharded_sizes() const { return tp_spec ? tp_spec->local_sizes() : tensor.sizes(); }
};

class ShardedParam {
 public:
  /// Shards a parameter into `chunk`, on the meta device without values. `is_alias`: the full tensor is that memory.
  ShardedParam(const ParamInfo& param, const ParamSlot& slot, const at::Tensor& chunk, const UnitContext& context,
               bool is_alias);

  const at::Tensor& param() const { return param_; }
  const ParamSlot& slot() const { return slot_; }
  const SpecPtr& spec() const { return dtensor_meta(sharded_)->spec; }
  const ParameterOrigin& origin() const { return *dtensor_meta(sharded_)->origin; }
  /// Says "weight.grad" in messages about the gradient.
  const std::shared_ptr<const ParameterOrigin>& grad_origin() const { return grad_origin_; }
  bool requires_grad() const { return param_.requires_grad(); }
  /// This rank's part, a plain tensor, in either state.
  const at::Tensor& shard() const { return dtensor_meta(sharded_)->local; }
  /// The full tensor (or its local part), a plain one. Has memory from set_unsharded_memory() to to_sharded().
  const at::Tensor& unsharded() const { return unsharded_; }

  /// Moves the shard to `chunk`, without its values. Only while sharded.
  void move_to(const at::Tensor& chunk);
  /// Returns whether module.to() or set_data replaced what sharding gave the parameter. Only while sharded.
  bool was_replaced() const { return dtensor_meta(param_) != dtensor_meta(sharded_); }

  /// Gives the unsharded tensor memory in `block`; contents are undefined.
  void set_unsharded_memory(PoolBlock& block, size_t offset);
  void drop_unsharded_memory();
  void to_unsharded();
  /// Makes the parameter the DTensor, unless its data were replaced, and drops the unsharded memory.
  void to_sharded();

  /// Expects that the full tensor is not written from now on. While unsharded.
  void expect_no_writes() {
    expected_version_ = read_version(param_);
    expected_shard_version_ = read_version(shard());
  }
  /// Returns whether it was, rather than the shard, whose version a DTensor taken while sharded counts too.
  bool was_written() const {
    return read_version(param_) != expected_version_ && read_version(shard()) == expected_shard_version_;
  }
  /// Counts in-place changes of the shard; 0 for inference tensors, which do not count.
  int64_t version() const { return read_version(shard()); }

  /// Returns whether the gradient is a sharded one: not what autograd accumulated while unsharded.
  bool has_sharded_grad() const;
  /// Gives the sharded gradient the parameter's placements. Collective where an op's backward gave it others.
  void place_sharded_grad();
  /// Sets the sharded gradient aside, so that autograd accumulates an unsharded one.
  void stash_sharded_grad();
  const at::Tensor& stashed_grad() const { return stashed_grad_; }
  void restore_stashed_grad();
  /// Sets the gradient, a DTensor, in place of the stashed one.
  void set_sharded_grad(at::Tensor grad);

  /// Takes what autograd accumulated and keep_unsharded_grad() kept, as a plain tensor like unsharded(); undefined if
  /// there is nothing. Collective with tensor parallelism, with partial sums in `dtype`.
  at::Tensor take_unsharded_grad(at::ScalarType dtype);
  /// Sets what autograd accumulated aside, in `dtype`, for a later take_unsharded_grad(). No communication.
  void keep_unsharded_grad(at::ScalarType dtype);
  /// Returns whether it did so while the parameter was trained, since the last take or drop. The same on all ranks.
  bool awaits_reduction() const { return awaits_reduction_; }
  void drop_unsharded_grads();
  /// Takes what autograd accumulated since backward began, as it is.
  at::Tensor take_accumulated();

 private:
  // Asks the impl: Tensor::_version() goes through libtorch's hooks for Python.
  static uint32_t read_version(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->is_inference() ? 0 : impl->version_counter().current_version();
  }

  at::Tensor take_all_accumulated();

  at::Tensor param_;
  ParamSlot slot_;
  std::shared_ptr<const ParameterOrigin> grad_origin_;
  SpecPtr unsharded_spec_;
  at::Tensor sharded_;       // the DTensor whose data the parameter takes on
  at::Tensor unsharded_;     // plain, full sizes
  ReadGuard reads_;          // of that
  at::Tensor in_use_;        // what the parameter takes on while unsharded: unsharded_, or the DTensor over it
  at::Tensor stashed_grad_;  // sharded
  at::Tensor kept_grad_;     // unsharded
  bool awaits_reduction_ = false;
  uint32_t expected_version_ = 0, expected_shard_version_ = 0;
  bool is_alias_;
};

/// Returns whether one of them requires a gradient.
bool has_trainable(std::span<const ShardedParam> params);
/// Restores the stashed gradients of all, also of those that were frozen since.
void restore_stashed_grads(std::span<ShardedParam> params);

}  // namespace tessera
