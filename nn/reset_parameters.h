#pragma once
// Initializes a module that was built without memory (nn/meta_device.h), or reinitializes any module.
//
//   tessera::manual_seed(0);               // dtensor/random/random.h; at::manual_seed(0) if parameters are plain
//   reset_parameters(*model);
//
// Calls reset_parameters() of each module that has one, like libtorch's layers, in the order in which constructors
// draw: registered children first, then the module. A sharded model thus gets bit-equal values to a single process that
// builds it with the same seed. A parameter of two modules gets the later one's values.
// Thread safety: like writes to the parameters.

#include <torch/nn/module.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Interface of a module that initializes its own parameters and buffers. Runs after that of its children, and may also
/// set their parameters.
///
///   struct ScaleImpl : torch::nn::Module, ResettableParameters {
///     void reset_parameters() override { const torch::NoGradGuard no_grad; scale.fill_(1); }
///     at::Tensor scale;
///   };
class ResettableParameters {
 public:
  virtual ~ResettableParameters() = default;
  virtual void reset_parameters() = 0;
};

/// Initializes all parameters at and below `module`. Throws, before any change:
/// - NotImplementedError, naming the first module with own parameters or buffers that cannot initialize them, such as
///   torch::nn::MultiheadAttention and PReLU, whose functions are not public.
/// - StateError for a parameter or buffer on the meta device.
void reset_parameters(ModuleRef module);

}  // namespace tessera
