#pragma once
// AllGatherExtension: replaces the shard of a parameter in all-gathers, for example by a quantized version. Shards,
// gradients and optimizer states are unaffected; gradients are those of the decoded parameters.
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
// Source: fsdp_pre_all_gather and fsdp_post_all_gather of torch/distributed/fsdp/_fully_shard/_fsdp_param.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace tessera {

class AllGatherExtension {
 public:
  virtual ~AllGatherExtension() = default;

  /// Returns the number of bytes that encode `numel` elements. Equal on all ranks.
  virtual int64_t encoded_bytes(int64_t numel) const = 0;
  /// Encodes `shard`, this rank's rows as a 1-D tensor padded with zeros, into `encoded`, which has
  /// encoded_bytes(shard.numel()) bytes.
  virtual void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const = 0;
  /// Decodes a rank's `encoded` into `decoded`, 1-D in the compute dtype.
  virtual void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const = 0;
};

/// Returns the extension of a parameter by its name in the unit, or null to send it in the compute dtype.
using AllGatherExtensionFn =
    std::function<std::shared_ptr<const AllGatherExtension>(const at::Tensor& param, const std::string& name)>;

}  // namespace tessera
