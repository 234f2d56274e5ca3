#pragma once
// Adam, AdamW and SGD whose step is one op of libtorch for all parameters of a group that are of one dtype, device and
// mesh.
//
//   fully_shard(model);
//   tessera::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
//   loss.backward();
//   optimizer.step();                        // one at::_fused_adamw_ over all local shards
//
// libtorch's own optimizers take about twelve ops a parameter and step: on small or sharded parameters they are most of
// a step's time. These are libtorch's in all but step(): options, groups, state, saving and loading are theirs, so that
// checkpoints, schedulers and whatever takes a torch::optim::AdamW& take these as well. Results differ from libtorch's
// by rounding only.
//
// A parameter that is listed twice is stepped twice, as libtorch's own do: so are tied parameters in what libtorch's
// parameters() returns. Where one step is meant, list them once.
//
// A group may have plain tensors and DTensors, of several meshes, dtypes and devices. A parameter without a gradient is
// left alone, and its count of steps does not grow. Those that lie on CUDA are updated by one kernel for many.
//
// step(closure) as in torch::optim. Throws ValueError for a sparse gradient and for one of another dtype than its
// parameter, NotImplementedError for parameters that are not Float, Double, Half or BFloat16, such as complex ones; no
// parameter has changed then. Source of the idea: `fused=True` of torch/optim/adamw.py.
// Thread safety: as torch::optim; each rank has its own.

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace tessera::optim {

class FusedAdam : public torch::optim::Adam {
 public:
  using Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedAdamW : public torch::optim::AdamW {
 public:
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;
};

class FusedSGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera::optim
