#pragma once
// Capturable: an optimizer whose step can be part of a CapturedStep (captured_step/captured_step.h).

namespace tessera::optim {

/// Thread safety: like torch::optim.
class Capturable {
 public:
  virtual ~Capturable() = default;

  /// Keeps learning rates, rounded to float32, and step counts on the parameters' device from the next step() on.
  virtual void make_capturable() = 0;
  /// Says whether step() is recorded: it then throws StateError for a parameter that it would step for the first time.
  virtual void set_capturing(bool capturing) = 0;
  /// Writes learning rates that have changed to the device, before a replay.
  virtual void before_replay() = 0;
  /// Counts the step that a replay makes.
  virtual void after_replay() = 0;
};

}  // namespace tessera::optim
