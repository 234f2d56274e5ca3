#pragma once
// AllGatherExtension: what is sent of a parameter in place of its shard, such as a quantized one. Shards, gradients and
// optimizer states stay as they are: gradients are those of the decoded parameters.
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
//
// Thread safety: called by the thread that runs the rank's forward and backward, on CUDA's current stream.
// After fsdp_pre_all_gather and fsdp_post_all_gather of torch/distributed/fsdp/_fully_shard/_fsdp_param.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tessera {

class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  /// Returns the bytes that `numel` elements are sent in: the same on all ranks.
  virtual int64_t encoded_bytes(int64_t numel) const = 0;
  /// Writes `encoded`, encoded_bytes(shard.numel()) bytes, from this rank's rows, 1-D, with zeros behind.
  virtual void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const = 0;
  /// Writes `decoded`, 1-D in the compute dtype, from what some rank has encoded.
  virtual void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const = 0;
};

/// Gives the extension of a parameter by its name in the unit; null: it is sent in the compute dtype.
using AllGatherExtensionFn =
    std::function<std::shared_ptr<const AllGatherExtension>(const at::Tensor& param, const std::string& name)>;

}  // namespace tessera
