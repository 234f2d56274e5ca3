#pragma once
// One parameter of a fully_shard unit and its two states.
//
//   sharded     the parameter is a DTensor, Shard(0), over this rank's rows in the unit's flat shard. This is
//               what the optimizer sees, and `grad` is a DTensor alike.
//   unsharded   it is a plain tensor with all rows, in the compute dtype. Its memory exists only in this state.
//
// set_data switches the *same* TensorImpl between the two, so module members, parameters() and optimizers
// built before or after sharding all keep referring to it. Autograd saves views of the unsharded tensor that
// share its storage; so the storage object lives on, and only its bytes are freed and allocated again.
//
// Thread safety: for the thread that runs the rank's forward and backward.
// The vocabulary follows [Note: FSDP tensors] in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.

#include <ATen/core/Tensor.h>

#include <memory>

#include "dtensor/dtensor_impl.h"
#include "fully_shard/param_layout.h"

namespace tessera {

class ShardedParam {
 public:
  struct Options {
    DeviceMesh mesh;
    at::ScalarType compute_dtype;
    std::shared_ptr<const ParameterOrigin> origin;
  };

  /// Takes `param`, a plain leaf: copies its own rows into `flat_shard` (1-D, of the parameter's dtype) and
  /// makes it sharded.
  ShardedParam(at::Tensor param, const ParamSlot& slot, const at::Tensor& flat_shard, Options options);

  const at::Tensor& param() const { return param_; }
  const ParameterOrigin& origin() const { return *origin_; }
  const ParamSlot& slot() const { return slot_; }
  const SpecPtr& spec() const { return spec_; }
  bool requires_grad() const { return param_.requires_grad(); }

  /// Throws StateError if the parameter's data are no longer those that sharding gave it (module.to(),
  /// set_data): a gather would bring back the old ones.
  void check_not_replaced() const;
  /// Allocates the unsharded memory. Its contents are undefined until copied in through unsharded().
  void allocate_unsharded();
  /// The full tensor in the compute dtype, 1-D. Only after allocate_unsharded().
  const at::Tensor& unsharded_flat() const { return unsharded_flat_; }
  /// The parameter becomes the full tensor.
  void to_unsharded();
  /// The parameter becomes the DTensor; the unsharded memory is freed. Its grad must be sharded or undefined.
  void to_sharded();

  /// Sets the sharded gradient aside, so that autograd accumulates an unsharded one.
  void stash_sharded_grad();
  /// Takes the unsharded gradient that autograd accumulated; undefined if the parameter was not used.
  at::Tensor take_unsharded_grad();
  /// The gradient is what was set aside plus `reduced` (this rank's rows, 1-D; may be undefined).
  void set_sharded_grad(const at::Tensor& reduced);

  /// Counts in-place changes of the shard, through the parameter, its data() or its local tensor.
  int64_t version() const;
  /// Bytes that the unsharded tensor occupies now.
  size_t unsharded_bytes() const;

 private:
  at::Tensor param_;
  ParamSlot slot_;
  std::shared_ptr<const ParameterOrigin> origin_;
  std::shared_ptr<const ParameterOrigin> grad_origin_;
  SpecPtr spec_;
  at::Tensor sharded_;    // the DTensor whose data the parameter takes on
  at::Tensor unsharded_;  // plain, full sizes
  at::Tensor unsharded_flat_;
  at::Tensor sharded_grad_;
};

}  // namespace tessera
