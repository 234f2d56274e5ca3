#pragma once
// CapturedStep: a training step that a GPU runs with one launch, as a CUDA graph.
//
//   const auto tokens = at::empty({8, 1024}, at::TensorOptions(at::kCUDA).dtype(at::kLong));
//   const auto targets = at::empty_like(tokens);
//   CapturedStep step(optimizer, [&] {
//     optimizer.zero_grad();
//     const auto loss = compute_loss(model(tokens), targets);
//     loss.backward();
//     clip_grad_norm_(model->parameters(), 1.0);
//     optimizer.step();
//     return loss.detach();
//   });
//   for (...) {
//     tokens.copy_(batch.tokens);           // pass data through tensors that stay
//     optim::set_lrs(optimizer, ...);       // learning rates may change
//     const at::Tensor loss = step();       // overwritten by the next call
//   }
//
// The first calls run the function normally, to warm up pools and kernels. The next one records it. From then on, a
// call costs one launch for forward, backward, reductions, clipping, optimizer, resharding and unsharding.
//
// - The function runs on a separate stream. That stream and the caller's current stream wait for each other.
// - Host values keep their values from the recording: shapes, branches, weight decay, seeds of DTensors' random ops.
//   Learning rates and step counts are on the device.
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
  int warmup = 3;  // number of calls before the recording, at least 2
};

/// Captures and replays a step. Thread safety: for the thread that runs the rank's forward and backward.
class CapturedStep {
 public:
  /// Keeps a reference to the optimizer, which must outlive it. The function must return a tensor on the device.
  /// Throws:
  /// - ValueError for `warmup` below 2.
  /// - NotImplementedError for a device other than a GPU, or more than one rank.
  CapturedStep(optim::Capturable& optimizer, std::function<at::Tensor()> step, const CapturedStepOptions& options = {});
  ~CapturedStep();
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  /// Runs the step without waiting for the device. Throws:
  /// - the function's exceptions, while it runs.
  /// - NotImplementedError, naming the call, for a function that cannot be recorded, for example because it waits for
  ///   the device.
  /// - StateError after one of these.
  at::Tensor operator()();

  bool is_captured() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
