#include "debug/step_meter.h"

#include <algorithm>

#include "comm/context/flight_record.h"

namespace tessera {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double seconds_waited() {
  int64_t total = 0;
  for (const auto& group : FlightRecord::of_rank()->groups()) {
    total += group.waited_ns;
  }
  return static_cast<double>(total) * 1e-9;
}

std::map<std::string, double> bytes_by_group() {
  std::map<std::string, double> bytes;
  for (const auto& group : FlightRecord::of_rank()->groups()) {
    bytes[group.name] += static_cast<double>(group.bytes_sent);
  }
  return bytes;
}

}  // namespace

StepMeter::Scope::Scope(StepMeter& meter, StepPart part)
    : meter_(&meter), part_(part), begin_(Clock::now()), waited_(seconds_waited()) {
  if (part == StepPart::Unmetered) {
    bytes_sent_ = bytes_by_group();
  }
}

StepMeter::Scope::~Scope() {
  if (meter_) {
    meter_->seconds_[static_cast<size_t>(part_)] += seconds_since(begin_);
    meter_->part_waited_ += seconds_waited() - waited_;
  }
  if (meter_ && part_ == StepPart::Unmetered) {
    for (const auto& [group, bytes] : bytes_by_group()) {
      meter_->bytes_sent_[group] += bytes - bytes_sent_[group];
    }
  }
}

StepMeter::StepMeter() {
  begin();
}

void StepMeter::begin() {
  begin_ = Clock::now();
  waited_ = seconds_waited();
  bytes_sent_ = bytes_by_group();
  std::ranges::fill(seconds_, 0);
  part_waited_ = 0;
  steps_ = 0;
}

StepReport StepMeter::read() {
  const double all = seconds_since(begin_) - seconds_[static_cast<size_t>(StepPart::Unmetered)];
  const auto steps = static_cast<double>(std::max<int64_t>(1, steps_));
  StepReport report{.steps = steps_,
                    .seconds = all / steps,
                    .communication = (seconds_waited() - waited_ - part_waited_) / steps,
                    .data = seconds_[static_cast<size_t>(StepPart::Data)] / steps,
                    .checkpoint = seconds_[static_cast<size_t>(StepPart::Checkpoint)] / steps};
  report.compute = report.seconds - report.communication - report.data - report.checkpoint;
  for (const auto& [group, bytes] : bytes_by_group()) {
    report.bytes_sent[group] = (bytes - bytes_sent_[group]) / steps;
  }
  begin();
  return report;
}

}  // namespace tessera
