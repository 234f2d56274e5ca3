#pragma once
// StepMeter: measures how a rank's training steps spend their time, and the bytes that they send.
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

/// Part of a step besides forward, backward and optimizer. Unmetered parts, such as validation, do not count.
enum class StepPart : uint8_t { Data, Checkpoint, Unmetered };

/// Means per step.
struct StepReport {
  int64_t steps = 0;
  double seconds = 0;
  double compute = 0;        // remaining time
  double communication = 0;  // time the rank's thread waits, not hidden by computation; 0 on CUDA
  double data = 0;
  double checkpoint = 0;
  std::map<std::string, double> bytes_sent = {};  // by group name, such as "dp"
};

/// Reads the flight record (comm/context/flight_record.h) of the rank that creates it. Thread safety: for its thread.
class StepMeter {
 public:
  class Scope {
   public:
    Scope() = default;  // measures nothing
    Scope(StepMeter& meter, StepPart part);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    StepMeter* meter_ = nullptr;
    StepPart part_ = StepPart::Data;
    std::chrono::steady_clock::time_point begin_;
    double waited_ = 0;
    std::map<std::string, double> bytes_sent_;  // before an unmetered part
  };

  StepMeter();

  /// Counts time until the end of the scope as `part`, including its communication. Scopes do not nest.
  [[nodiscard]] Scope time(StepPart part) { return {*this, part}; }
  void end_step() { ++steps_; }
  /// Returns the means since the last read() and restarts.
  StepReport read();

 private:
  void begin();

  std::chrono::steady_clock::time_point begin_;
  double waited_ = 0;                         // seconds since the rank's start
  std::map<std::string, double> bytes_sent_;  // likewise
  double seconds_[3] = {};                    // of each part since begin_
  double part_waited_ = 0;                    // wait time within parts
  int64_t steps_ = 0;
};

}  // namespace tessera
