#pragma once
// The parameters of one fully_shard unit: gathered together, freed together, reduced together.
//
//            unshard()                    reshard()
//   Sharded ──────────▶ Unsharded ──────────────────▶ Sharded
//              all-gather     │                           ▲
//                             └── take gradients, reshard, ┘
//                                 reduce_gradients(): reduce-scatter
//
// The shards of all parameters are views of one flat buffer, so the all-gather has no copy-in.
// Thread safety: for the thread that runs the rank's forward and backward.

#include <memory>
#include <string>
#include <vector>

#include "fully_shard/policy.h"
#include "fully_shard/sharded_param.h"

namespace tessera {

struct NamedParam {
  at::Tensor tensor;
  std::shared_ptr<const ParameterOrigin> origin;
};

class ParamGroup {
 public:
  /// Shards `params` (plain leaves of one dtype, at least one dim each) over the 1-D `mesh`.
  ParamGroup(const std::vector<NamedParam>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy);

  bool is_unsharded() const { return unsharded_; }
  /// Collective unless unsharded already. Throws StateError if a parameter was replaced since it was sharded.
  void unshard();
  void reshard();

  /// Sets sharded gradients aside so that backward accumulates unsharded ones. Only while unsharded.
  void begin_backward();
  /// Averages the accumulated gradients over the ranks into sharded ones. Only while sharded. Collective.
  void reduce_gradients();
  /// Drops unsharded gradients and puts back the sharded ones: after a backward that failed.
  void abort_backward();

  const std::vector<ShardedParam>& params() const { return params_; }
  std::vector<int64_t> versions() const;
  bool has_trainable() const;
  size_t unsharded_bytes() const;

 private:
  DeviceMesh mesh_;
  ParamLayout layout_;
  at::Tensor flat_shard_;
  at::ScalarType compute_dtype_;
  at::ScalarType reduce_dtype_;
  std::vector<ShardedParam> params_;
  bool unsharded_ = false;
};

}  // namespace tessera
