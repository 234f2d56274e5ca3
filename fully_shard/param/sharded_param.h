#pragma once
// ShardedParam: one parameter of a unit, and its two states.
//
//   sharded     a DTensor, Shard(dim) over the sharding axis (with tensor parallelism, over both meshes:
//               stacked_spec.h). Its local tensor is this rank's part of the unit's flat shard. The optimizer sees this
//               state.
//   unsharded   a plain tensor with all rows, in the compute dtype; with tensor parallelism, a DTensor on its mesh. Its
//               memory exists only in this state. With one rank and no cast, it uses the shard's memory.
//
// set_data switches the *same* TensorImpl between the two states, so module members, parameters() and optimizers stay
// valid. Views that autograd saved share the unsharded storage, so the storage stays and only its memory is released.
// Terms follow [Note: FSDP tensors] in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
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
  SpecPtr tp_spec = nullptr;  // tensor-parallel spec; null for a plain tensor
  GatherItem gather;          // communication and compute format

  /// Returns the sizes of this rank's part while unsharded.
  at::IntArrayRef unsharded_sizes() const { return tp_spec ? tp_spec->local_sizes() : tensor.sizes(); }
};

class ShardedParam {
 public:
  /// Moves a parameter's shard to `chunk`; on the meta device, without values. `is_alias`: the full tensor is that
  /// memory.
  ShardedParam(const ParamInfo& param, const ParamSlot& slot, const at::Tensor& chunk, const UnitContext& context,
               bool is_alias);

  const at::Tensor& param() const { return param_; }
  const ParamSlot& slot() const { return slot_; }
  const SpecPtr& spec() const { return dtensor_meta(sharded_)->spec; }
  const ParameterOrigin& origin() const { return *dtensor_meta(sharded_)->origin; }
  /// Returns the origin of the gradient in messages, "weight.grad".
  const std::shared_ptr<const ParameterOrigin>& grad_origin() const { return grad_origin_; }
  bool requires_grad() const { return param_.requires_grad(); }
  /// Returns this rank's shard as a plain tensor, in either state.
  const at::Tensor& shard() const { return dtensor_meta(sharded_)->local; }
  /// Returns the full tensor (or its local part), plain. Has memory from set_unsharded_memory() to to_sharded().
  const at::Tensor& unsharded() const { return unsharded_; }

  /// Moves the shard to `chunk`, without copying values. Only while sharded.
  void move_to(const at::Tensor& chunk);
  /// Returns whether module.to() or set_data replaced the sharded parameter's data. Only while sharded.
  bool was_replaced() const { return dtensor_meta(param_) != dtensor_meta(sharded_); }

  /// Gives the unsharded tensor memory in `block`, with undefined contents.
  void set_unsharded_memory(PoolBlock& block, size_t offset);
  void drop_unsharded_memory();
  void to_unsharded();
  /// Turns the parameter into the DTensor, unless its data was replaced, and drops the unsharded memory.
  void to_sharded();

  /// Records the version, so that was_written() detects later writes of the full tensor. While unsharded.
  void expect_no_writes() {
    expected_version_ = read_version(param_);
    expected_shard_version_ = read_version(shard());
  }
  /// Returns whether the full tensor was written, and not the shard, whose version a DTensor taken while sharded
  /// shares.
  bool was_written() const {
    return read_version(param_) != expected_version_ && read_version(shard()) == expected_shard_version_;
  }
  /// Returns the number of in-place changes of the shard; 0 for inference tensors, which do not count them.
  int64_t version() const { return read_version(shard()); }

  /// Returns whether the gradient is sharded, rather than accumulated by autograd while unsharded.
  bool has_sharded_grad() const;
  /// Redistributes the sharded gradient to the parameter's placements. Collective if an op's backward used others.
  void place_sharded_grad();
  /// Stashes the sharded gradient, so that autograd accumulates an unsharded one.
  void stash_sharded_grad();
  const at::Tensor& stashed_grad() const { return stashed_grad_; }
  void restore_stashed_grad();
  /// Sets the gradient, a DTensor, and replaces the stashed one.
  void set_sharded_grad(at::Tensor grad);

  /// Takes the gradient that autograd accumulated and keep_unsharded_grad() kept, as a plain tensor like unsharded(),
  /// or undefined. Collective with tensor parallelism, with partial sums in `dtype`.
  at::Tensor take_unsharded_grad(at::ScalarType dtype);
  /// Keeps the accumulated gradient, in `dtype`, for a later take_unsharded_grad(). Does not communicate.
  void keep_unsharded_grad(at::ScalarType dtype);
  /// Returns whether it kept one for a trained parameter since the last take or drop. Equal on all ranks.
  bool awaits_reduction() const { return awaits_reduction_; }
  void drop_unsharded_grads();
  /// Takes the gradient that autograd accumulated since backward began, unchanged.
  at::Tensor take_accumulated();

 private:
  // Reads it from the impl, because Tensor::_version() goes through libtorch's hooks for Python.
  static uint32_t read_version(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->is_inference() ? 0 : impl->version_counter().current_version();
  }

  at::Tensor take_all_accumulated();

  at::Tensor param_;
  ParamSlot slot_;
  std::shared_ptr<const ParameterOrigin> grad_origin_;
  SpecPtr unsharded_spec_;
  at::Tensor sharded_;       // DTensor whose data the parameter has while sharded
  at::Tensor unsharded_;     // plain, full sizes
  ReadGuard reads_;          // guards unsharded_
  at::Tensor in_use_;        // data of the parameter while unsharded: unsharded_, or the DTensor over it
  at::Tensor stashed_grad_;  // sharded
  at::Tensor kept_grad_;     // unsharded
  bool awaits_reduction_ = false;
  uint32_t expected_version_ = 0, expected_shard_version_ = 0;
  bool is_alias_;
};

/// Returns whether any of the parameters requires a gradient.
bool has_trainable(std::span<const ShardedParam> params);
/// Restores the stashed gradients of all parameters, including any frozen since then.
void restore_stashed_grads(std::span<ShardedParam> params);

}  // namespace tessera
