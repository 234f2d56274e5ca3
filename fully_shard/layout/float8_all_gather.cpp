#include "fully_shard/layout/float8_all_gather.h"

#include <ATen/TensorOperators.h>

namespace tessera {

namespace {

constexpr auto kFloat8 = at::kFloat8_e4m3fn;
constexpr double kLargest = 448;     // of the format
constexpr double kSmallest = 1e-30;  // of rows that are scaled up: 448 / 1e-30 is a float32
constexpr int64_t kScaleBytes = 16;  // a float32, padded to a multiple of 16

at::Tensor view_scale(const at::Tensor& encoded) {
  return encoded.narrow(0, 0, sizeof(float)).view(at::kFloat);
}

at::Tensor encoded_values(const at::Tensor& encoded) {
  return encoded.narrow(0, kScaleBytes, encoded.numel() - kScaleBytes).view(kFloat8);
}

class Float8AllGather final : public AllGatherExtension {
 public:
  int64_t encoded_bytes(int64_t numel) const override { return kScaleBytes + numel; }

  /// The scale stays on the device, so the host does not wait.
  void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const override {
    const at::Tensor values = shard.to(at::kFloat);
    const at::Tensor scale = kLargest / values.abs().max().clamp_min(kSmallest);
    encoded.narrow(0, 0, kScaleBytes).zero_();
    view_scale(encoded).copy_(scale);
    encoded_values(encoded).copy_((values * scale).clamp(-kLargest, kLargest));
  }

  void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const override {
    decoded.copy_(encoded_values(encoded).to(at::kFloat) / view_scale(encoded));
  }
};

}  // namespace

std::shared_ptr<const AllGatherExtension> float8_all_gather() {
  static const auto extension = std::make_shared<const Float8AllGather>();
  return extension;
}

}  // namespace tessera
