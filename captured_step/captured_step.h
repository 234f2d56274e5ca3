#pragma once
// CapturedStep: a training step that a GPU runs in one launch, as a CUDA graph.
//
//   const auto tokens = at::empty({8, 1024}, at::TensorOptions(at::kCUDA).dtype(at::kLong)), targets =
//   at::empty_like(tokens); CapturedStep step(optimizer, [&] {
//     optimizer.zero_grad();
//     const auto loss = compute_loss(model(tokens), targets);
//     loss.backward();
//     clip_grad_norm_(model->parameters(), 1.0);
//     optimizer.step();
//     return loss.detach();
//   });
//   for (...) {
//     tokens.copy_(batch.tokens);           // data enter by tensors that stay
//     optim::set_lrs(optimizer, ...);       // learning rates may change
//     const at::Tensor loss = step();       // overwritten by the next call
//   }
//
// The first calls run the function, so that pools and kernels are warm. The next one records it, and from then on a
// call costs one launch: forward, backward, reductions, clipping, optimizer, resharding and unsharding.
//
// - The function runs on a stream of its own, which waits for the caller's current stream, and that for it.
// - Numbers of the host keep the values that they had when the step was recorded: shapes, branches, weight decay, seeds
//   of DTensors' random ops. Learning rates and step counts are on the device.
// - Learning rates are rounded to float32.
//
// Source: torch/cuda/graphs.py.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

#include "optim/capturable.h"

namespace tessera {

struct CapturedStepOptions {
  c10::Device device = c10::Device(c10::kCUDA, 0);
  int warmup = 3;  // calls before the recording, at least 2
};

/// Thread safety: for the thread that runs the rank's forward and backward.
class CapturedStep {
 public:
  /// Keeps a reference to the optimizer, which must outlive it. The function's result must be a tensor of the device.
  /// Throws:
  /// - ValueError for `warmup` below 2.
  /// - NotImplementedError for another device than a GPU, or more than one rank.
  CapturedStep(optim::Capturable& optimizer, std::function<at::Tensor()> step, const CapturedStepOptions& options = {});
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  /// Runs the step, without waiting for the device. Throws:
  /// - the function's exceptions, while it runs.
  /// - NotImplementedError for a function that cannot be recorded, since it waits for the device, say. It names the
  /// call.
  /// - StateError after one of these.
  at::Tensor operator()();

  bool is_captured() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
