#pragma once
// Capturable: an optimizer whose step can be part of a CapturedStep (captured_step/captured_step.h).

namespace tessera::optim {

/// Interface for CapturedStep. Thread safety: like torch::optim.
class Capturable {
 public:
  virtual ~Capturable() = default;

  /// From the next step() on, keeps learning rates, rounded to float32, and step counts on the parameters' device.
  virtual void make_capturable() = 0;
  /// Sets whether step() is being recorded. It then throws StateError for a parameter's first step.
  virtual void set_capturing(bool capturing) = 0;
  /// Writes changed learning rates to the device, before a replay.
  virtual void before_replay() = 0;
  /// Counts the step of a replay.
  virtual void after_replay() = 0;
};

}  // namespace tessera::optim
