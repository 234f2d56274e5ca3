#pragma once
// StepMeter: where a rank's training steps spend their time, and what they send.
//
//   StepMeter meter;
//   for (int64_t step = 0; step < steps; ++step) {
//     { const auto timed = meter.time(StepPart::Data); batch = next_batch(); }
//     train_step(batch);
//     meter.end_step();
//   }
//   const StepReport report = meter.read();  // report.seconds = compute + communication + data + checkpoint

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

namespace tessera {

/// A part of a step outside of forward, backward and optimizer. Unmetered, as a validation, does not count.
enum class StepPart : uint8_t { Data, Checkpoint, Unmetered };

/// Means a step.
struct StepReport {
  int64_t steps = 0;
  double seconds = 0;
  double compute = 0;        // the rest
  double communication = 0;  // waited for in the rank's own thread: what computation does not hide. On CUDA 0
  double data = 0;
  double checkpoint = 0;
  std::map<std::string, double> bytes_sent = {};  // by group, such as "dp"
};

/// Reads the flight record (comm/context/flight_record.h) of the rank that makes it. Thread safety: for its thread.
class StepMeter {
 public:
  class Scope {
   public:
    Scope() = default;  // times nothing
    Scope(StepMeter& meter, StepPart part);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    StepMeter* meter_ = nullptr;
    StepPart part_ = StepPart::Data;
    std::chrono::steady_clock::time_point begin_;
    double waited_ = 0;
    std::map<std::string, double> bytes_sent_;  // before what is not metered
  };

  StepMeter();

  /// Counts time until the scope's end as `part`, its communication included. Scopes do not nest.
  [[nodiscard]] Scope time(StepPart part) { return {*this, part}; }
  void end_step() { ++steps_; }
  /// Returns the means since the last read(), and begins anew.
  StepReport read();

 private:
  void begin();

  std::chrono::steady_clock::time_point begin_;
  double waited_ = 0;                         // seconds since the rank's start
  std::map<std::string, double> bytes_sent_;  // likewise
  double seconds_[3] = {};                    // of parts since begin_
  double part_waited_ = 0;                    // in them
  int64_t steps_ = 0;
};

}  // namespace tessera
