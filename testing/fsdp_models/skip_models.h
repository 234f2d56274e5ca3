#pragma once
// SkipModel: three layers of 10 → 10 without biases, of which two lie in modules of their own, and one of these is
// handed to wrap() (fsdp1/fsdp.h), which wraps inside of an EnableWrap only:
//
//   SkipModel             linear → linear_skip → nested_linear
//     SkipModule          lin; never wrapped
//     NestedLinear        nested_linear, handed to wrap() too where `fsdp_wrap` says so; itself always is
//
// After torch/testing/_internal/common_fsdp.py.

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
  /// double_nest: the layer inside of nested_linear is handed to wrap() too. `device` is wrap()'s device_id.
  explicit SkipModelImpl(bool double_nest, at::Device device = at::kCPU);
  at::Tensor forward(at::Tensor x) { return nested_linear(linear_skip(linear(x))); }

  tessera::nn::Linear linear{nullptr};
  SkipModule linear_skip{nullptr};
  NestedLinear nested_linear{nullptr};
};
TESSERA_MODULE(SkipModel);

}  // namespace tessera::testing
