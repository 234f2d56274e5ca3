#pragma once
// What is sent of a parameter in place of its shard: an extension point before and after the all-gather, for a
// quantised one, say.
//
//   struct Half : AllGatherExtension {                      // sends bfloat16, computes in float32
//     int64_t encoded_bytes(int64_t numel) const override { return 2 * numel; }
//     void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const override {
//       encoded.view(at::kBFloat16).copy_(shard);
//     }
//     void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const override {
//       decoded.copy_(encoded.view(at::kBFloat16));
//     }
//   };
//   fully_shard(block, {.all_gather_extension_fn = [](const at::Tensor& param, const std::string&) {
//     return param.dim() == 2 ? std::make_shared<Half>() : nullptr;
//   }});
//
// Shards, gradients and optimizer states stay as they are: gradients are those of the decoded parameters.
//
// Thread safety: its functions are called by the thread that runs the rank's forward and backward, and not by two at a
// time for one unit. They run on CUDA's current stream there.
// After fsdp_pre_all_gather and fsdp_post_all_gather of torch/distributed/fsdp/_fully_shard/_fsdp_param.py, which are
// methods of tensor subclasses.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tessera {

class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  /// Bytes that `numel` elements are sent in: the same on all ranks.
  virtual int64_t encoded_bytes(int64_t numel) const = 0;
  /// Writes `encoded`, 1-D of bytes (uint8), from this rank's rows, 1-D in the parameter's own dtype and, where this
  /// rank has fewer rows than others, followed by zeros. encoded.numel() is encoded_bytes(shard.numel()).
  virtual void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const = 0;
  /// Writes `decoded`, 1-D in the compute dtype, from what some rank has encoded.
  virtual void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const = 0;
};

/// The extension of a parameter, by its name below the unit's module; null: it is sent in the compute dtype.
using AllGatherExtensionFn =
    std::function<std::shared_ptr<const AllGatherExtension>(const at::Tensor& param, const std::string& name)>;

}  // namespace tessera
