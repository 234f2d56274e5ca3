#pragma once
// Adam, AdamW and SGD that update all parameters of one group, dtype, device and mesh with a single libtorch op.
//
//   tessera::optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
//   loss.backward();
//   optimizer.step();  // one at::_fused_adamw_ over all local shards
//
// libtorch's optimizers run about twelve ops per parameter, most of a step's time for small or sharded parameters.
// These differ only in step(), and from libtorch's results only by rounding; options, state, saving and loading are
// libtorch's. A group may mix plain tensors and DTensors of several meshes, dtypes and devices. Parameters without a
// gradient are skipped. A parameter listed twice, as libtorch's parameters() lists tied ones, is updated twice.
// step() throws, before any change, ValueError if a gradient is sparse or of another dtype, or state has another dtype
// or device, as after FSDP::to(). It throws NotImplementedError for parameters other than Float, Double, Half and
// BFloat16.
// Thread safety: like torch::optim; each rank has its own. Source: `fused=True` of torch/optim/adamw.py.

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>

#include "optim/capturable.h"

namespace tessera::optim {

struct CapturableAdam;

class FusedAdam : public torch::optim::Adam, public Capturable {
 public:
  using Adam::Adam;
  at::Tensor step(LossClosure closure = nullptr) override;

  void make_capturable() override;
  void set_capturing(bool capturing) override;
  void before_replay() override;
  void after_replay() override;

 private:
  std::shared_ptr<CapturableAdam> captured_;  // null until make_capturable()
};

class FusedAdamW : public torch::optim::AdamW, public Capturable {
 public:
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override;

  void make_capturable() override;
  void set_capturing(bool capturing) override;
  void before_replay() override;
  void after_replay() override;

 private:
  std::shared_ptr<CapturableAdam> captured_;  // null until make_capturable()
};

class FusedSGD : public torch::optim::SGD {
 public:
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override;
};

}  // namespace tessera::optim
