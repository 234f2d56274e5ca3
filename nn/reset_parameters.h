#pragma once
// Initial values for a module that was built without memory (nn/meta_device.h), or once more for any.
//
//   tessera::manual_seed(0);               // dtensor/random.h; at::manual_seed(0) where parameters are plain tensors
//   reset_parameters(*model);
//
// calls reset_parameters() of each module that has one, as the layers of libtorch have: in the order in which modules
// are registered, which is that in which a constructor that registers what it builds draws. So a sharded model gets the
// values of one process that built the model with the same seed, bit for bit. A parameter that two modules share gets
// those of the later one, also where the constructor tied them after the first.
//
// A module with parameters of its own says itself how they begin:
//
//   struct ScaleImpl : torch::nn::Module, ResettableParameters {
//     void reset_parameters() override { const torch::NoGradGuard no_grad; scale.fill_(1); }
//     at::Tensor scale;
//   };
//
// Thread safety: as writing to the parameters.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace tessera {

/// A module type that can initialize the parameters and buffers of its own, not those of its children.
class ResettableParameters {
 public:
  virtual ~ResettableParameters() = default;
  virtual void reset_parameters() = 0;
};

/// Initializes all parameters at and below `module`. Throws NotImplementedError, before it changes anything, that names
/// the first module with parameters or buffers of its own that does not know how (torch::nn::MultiheadAttention and
/// PReLU among libtorch's: their functions are not public), and StateError for one that is on the meta device.
void reset_parameters(torch::nn::Module& module);

template <class Impl>
void reset_parameters(const torch::nn::ModuleHolder<Impl>& module) {
  reset_parameters(static_cast<torch::nn::Module&>(*module.ptr()));
}

}  // namespace tessera
