#pragma once
// SkipModel: three layers of 10 → 10 without biases. Two are in separate modules, one of which is passed to wrap()
// (fsdp1/fsdp.h), which wraps only inside an EnableWrap:
//
//   SkipModel             linear → linear_skip → nested_linear
//     SkipModule          lin; never wrapped
//     NestedLinear        nested_linear, passed to wrap() too if `fsdp_wrap`; itself always is
//
// Source: torch/testing/_internal/common_fsdp.py.

#include "fsdp1/fsdp.h"
#include "nn/linear.h"

namespace tessera::testing {

struct SkipModuleImpl : torch::nn::Module {
  SkipModuleImpl();
  at::Tensor forward(at::Tensor x) { return lin(x); }

  tessera::nn::Linear lin{nullptr};
};
TESSERA_MODULE(SkipModule);

struct NestedLinearImpl : torch::nn::Module {
  explicit NestedLinearImpl(bool fsdp_wrap);
  at::Tensor forward(at::Tensor x) { return nested_linear(x); }

  tessera::nn::Linear nested_linear{nullptr};
};
TESSERA_MODULE(NestedLinear);

struct SkipModelImpl : torch::nn::Module {
  /// Builds the model. With double_nest, the layer inside nested_linear is passed to wrap() too. `device` is wrap()'s
  /// device_id.
  explicit SkipModelImpl(bool double_nest, at::Device device = at::kCPU);
  at::Tensor forward(at::Tensor x) { return nested_linear(linear_skip(linear(x))); }

  tessera::nn::Linear linear{nullptr};
  SkipModule linear_skip{nullptr};
  NestedLinear nested_linear{nullptr};
};
TESSERA_MODULE(SkipModel);

}  // namespace tessera::testing
