#pragma once
// Initial values for a module that was built without memory (nn/meta_device.h), or once more for any.
//
//   tessera::manual_seed(0);               // dtensor/random/random.h; at::manual_seed(0) where parameters are plain
//   tensors reset_parameters(*model);
//
// calls reset_parameters() of each module that has one, as the layers of libtorch have: a module's children first, in
// the order in which they are registered, then the module itself. That is the order in which a constructor draws that
// registers what it builds and then draws parameters of its own. So a sharded model gets the values of one process that
// built the model with the same seed, bit for bit. A parameter that two modules share gets those of the later one, also
// where the constructor tied them after the first. All values are drawn, also those that a constructor took from
// elsewhere: the table of an Embedding made by from_pretrained.
//
// A module with parameters of its own says itself how they begin:
//
//   struct ScaleImpl : torch::nn::Module, ResettableParameters {
//     void reset_parameters() override { const torch::NoGradGuard no_grad; scale.fill_(1); }
//     at::Tensor scale;
//   };
//
// It may set those below it too, which have their values by then: as a model does that draws them by another rule, or
// scales down the last layer of each block.
//
// Thread safety: as writing to the parameters.

#include <torch/nn/module.h>

#include "nn/hooks/module_ref.h"

namespace tessera {

/// A module type that can initialize the parameters and buffers of its own. Those of its children are initialized
/// before, so that it need not, and may.
class ResettableParameters {
 public:
  virtual ~ResettableParameters() = default;
  virtual void reset_parameters() = 0;
};

/// Initializes all parameters at and below `module`. Throws NotImplementedError, before it changes anything, that names
/// the first module with parameters or buffers of its own that does not know how (torch::nn::MultiheadAttention and
/// PReLU among libtorch's: their functions are not public), and StateError for one that is on the meta device.
void reset_parameters(ModuleRef module);

}  // namespace tessera
