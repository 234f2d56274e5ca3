#pragma once
// One parameter of a fully_shard unit and its two states.
//
//   sharded     the parameter is a DTensor, Shard(dim) over the sharding axis, whose local tensor is this rank's part
//               of the unit's flat shard. This is what the optimizer sees, and `grad` is a DTensor alike.
//   unsharded   it is a plain tensor with all rows, in the compute dtype. Its memory exists only in this state; where
//               one rank has all rows anyway, and nothing is cast, it is that of the shard.
//
// A parameter that tensor parallelism made a DTensor before is sharded over both meshes (stacked_spec.h), and unsharded
// it is a DTensor on the tensor-parallel mesh again. "All rows" are then those of its local tensor there.
//
// What set_data does switches the *same* TensorImpl between the two, so module members, parameters() and optimizers
// built before or after sharding all keep referring to it. Autograd saves views of the unsharded tensor that
// share its storage; so the storage object lives on, and only its bytes are acquired and given back.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// The vocabulary follows [Note: FSDP tensors] in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

#include "dtensor/local/dtensor_impl.h"
#include "fully_shard/layout/param_layout.h"
#include "fully_shard/memory/block_pool.h"

namespace tessera {

class ShardedParam {
 public:
  struct Options {
    SpecPtr spec;            // of the sharded parameter
    SpecPtr unsharded_spec;  // of the unsharded one, in the compute dtype; null where that is a plain tensor
    at::ScalarType compute_dtype;
    at::Device compute_device;
    std::shared_ptr<const ParameterOrigin> origin;
    int64_t rank;       // in the sharding group
    int64_t num_ranks;  // of the sharding group
    int64_t dim;        // that is sharded
    /// The full tensor is the flat shard's memory: there is one shard, and no cast.
    bool is_alias;
  };

  /// Takes `param`, a contiguous leaf, plain or on the mesh of unsharded_spec: copies its own part into `chunk`, its
  /// place in the unit's flat shard (flat_layout.h), and makes it sharded. On the meta device there is nothing to
  /// copy.
  ShardedParam(at::Tensor param, const ParamSlot& slot, const at::Tensor& chunk, Options options);

  const at::Tensor& param() const { return param_; }
  const ParameterOrigin& origin() const { return *origin_; }
  const ParamSlot& slot() const { return slot_; }
  const SpecPtr& spec() const { return spec_; }
  /// Of the shard and its gradient.
  at::ScalarType dtype() const { return spec_->dtype(); }
  /// "weight.grad", for messages about the gradient.
  const std::shared_ptr<const ParameterOrigin>& grad_origin() const { return grad_origin_; }
  bool requires_grad() const { return param_.requires_grad(); }
  /// This rank's part, a plain tensor, also while the parameter is unsharded.
  const at::Tensor& shard() const { return dtensor_meta(sharded_)->local; }
  /// Whether it is a DTensor while it is unsharded.
  bool is_tensor_parallel() const { return unsharded_spec_ != nullptr; }

  /// The shard is in `chunk` from now on; its values are not carried over. Only while sharded.
  void move_to(const at::Tensor& chunk);

  /// Whether the parameter's data are not those that sharding gave it: so after module.to() or set_data, also while it
  /// was unsharded, and a gather would bring back the old ones. Only while sharded.
  bool was_replaced() const { return dtensor_meta(param_) != dtensor_meta(sharded_); }

  size_t unsharded_size() const { return static_cast<size_t>(slot_.numel()) * unsharded_.element_size(); }
  /// The full tensor in the compute dtype, or its local part, but always a plain tensor. Has memory only between
  /// set_unsharded_memory() and to_sharded().
  const at::Tensor& unsharded() const { return unsharded_; }
  /// The unsharded tensor gets its memory in `block`; contents are undefined.
  void set_unsharded_memory(Block& block, size_t offset) {
    reads_.allow_reads();
    set_memory(unsharded_, block, offset, unsharded_size());
  }
  /// Takes the memory away again, while the parameter is sharded.
  void drop_unsharded_memory() {
    if (!is_alias_) {
      clear_memory(unsharded_);
      reads_.forbid_reads();
    }
  }
  /// The parameter becomes the full tensor.
  void to_unsharded();
  /// For was_written(). While unsharded.
  void expect_no_writes() {
    expected_version_ = version_of(param_);
    expected_shard_version_ = version_of(shard());
  }
  /// Whether the full tensor was written since expect_no_writes(). A DTensor that was taken of the parameter while it
  /// was sharded counts together with it: who writes that one writes the shard.
  bool was_written() const {
    return version_of(param_) != expected_version_ && version_of(shard()) == expected_shard_version_;
  }
  /// The parameter becomes the DTensor, unless its data were replaced; the unsharded memory is given back.
  void to_sharded();

  /// Whether the gradient is a sharded one: not what autograd accumulated while the parameter was unsharded.
  bool has_sharded_grad() const;
  /// Whether the gradient is a DTensor on a mesh that is not the parameter's, sharded or not: of a plain parameter that
  /// met DTensors.
  bool has_foreign_grad() const;
  /// The sharded gradient gets the parameter's placements. Collective where it has others, as the backward of an op may
  /// give them.
  void place_sharded_grad();
  /// Sets the sharded gradient aside, so that autograd accumulates an unsharded one.
  void stash_sharded_grad();
  const at::Tensor& stashed_grad() const { return stashed_grad_; }
  /// The gradient is what was set aside again.
  void restore_stashed_grad();
  /// The gradient is this DTensor; what was set aside is dropped.
  void set_sharded_grad(at::Tensor grad);

  /// Takes what autograd accumulated, added to what keep_unsharded_grad() kept, as a plain tensor of the sizes of
  /// unsharded(); undefined if there is nothing. Collective over the tensor-parallel mesh where autograd left the
  /// gradient otherwise there than the parameter lies; terms of a sum are added up in `dtype`.
  at::Tensor take_unsharded_grad(at::ScalarType dtype);
  /// Sets what autograd accumulated aside, in `dtype`, for a later take_unsharded_grad(). No communication.
  void keep_unsharded_grad(at::ScalarType dtype);
  /// Whether keep_unsharded_grad() was called while the parameter was trained, since the last take or drop: the same on
  /// all ranks, whichever of them had a gradient.
  bool awaits_reduction() const { return awaits_reduction_; }
  void drop_unsharded_grads();
  void drop_accumulated() { take_accumulated(); }

  /// Counts in-place changes of the shard, through the parameter, its data() or its local tensor; 0 for inference
  /// tensors, which do not count.
  int64_t version() const { return version_of(shard()); }
  /// Bytes that the unsharded tensor occupies now, beside the shard.
  size_t unsharded_bytes() const { return is_alias_ ? 0 : unsharded_.storage().nbytes(); }

 private:
  /// Asks the impl: Tensor::_version() goes through libtorch's hooks for Python.
  static uint32_t version_of(const at::Tensor& tensor) {
    auto* impl = tensor.unsafeGetTensorImpl();
    return impl->is_inference() ? 0 : impl->version_counter().current_version();
  }
  bool is_in_use() const;
  at::Tensor place_in(const at::Tensor& chunk);
  at::Tensor take_accumulated();
  at::Tensor take_all_accumulated();

  at::Tensor param_;
  ParamSlot slot_;
  std::shared_ptr<const ParameterOrigin> origin_;
  std::shared_ptr<const ParameterOrigin> grad_origin_;
  SpecPtr spec_;
  SpecPtr unsharded_spec_;
  at::Tensor sharded_;       // the DTensor whose data the parameter takes on
  at::Tensor unsharded_;     // plain, full sizes
  ReadGuard reads_;          // of that
  at::Tensor in_use_;        // what the parameter takes on while unsharded: unsharded_, or the DTensor over it
  at::Tensor stashed_grad_;  // sharded
  at::Tensor kept_grad_;     // unsharded
  bool awaits_reduction_ = false;
  uint32_t expected_version_ = 0, expected_shard_version_ = 0;
  int64_t own_numel_;
  bool is_alias_;
};

/// All gradients that were set aside are the parameters' again, also of those that were frozen since.
void restore_stashed_grads(std::span<ShardedParam> params);

}  // namespace tessera
