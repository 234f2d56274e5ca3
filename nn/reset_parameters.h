#pragma once
// Initial values for a module that was built without memory (nn/meta_device.h), or once more for any.
//
//   tessera::manual_seed(0);               // dtensor/random/random.h; at::manual_seed(0) where parameters are plain
//   tensors reset_parameters(*model);
//
// calls reset_parameters() of each module that has one, as libtorch's layers do: children first, in the order in which
// they are registered, then the module itself, as constructors draw. So a sharded model gets the values of one process
// that built the model with the same seed, bit for bit. A parameter that two modules share gets the later one's values.
//
// A module with parameters of its own says itself how they begin:
//
//   struct ScaleImpl : torch::nn::Module, ResettableParameters {
//     void reset_parameters() override { const torch::NoGradGuard no_grad; scale.fill_(1); }
//     at::Tensor scale;
//   };
//
// It may set those of its children too, which are initialized before it.
//
// Thread safety: as writing to the parameters.

#include <torch/nn/module.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// Interface of a module that initializes its own parameters and buffers, after those of its children.
class ResettableParameters {
 public:
  virtual ~ResettableParameters() = default;
  virtual void reset_parameters() = 0;
};

/// Initializes all parameters at and below `module`. Throws, before it changes anything:
/// - NotImplementedError that names the first module with parameters or buffers of its own that cannot initialize them
///   (torch::nn::MultiheadAttention and PReLU, whose functions are not public).
/// - StateError for a parameter on the meta device.
void reset_parameters(ModuleRef module);

}  // namespace tessera
