#include "testing/simulated_gpu/stream_clocks.h"

#include <algorithm>

#include "base/error.h"

namespace tessera::simulated_gpu {

namespace {

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()), 0);
  for (size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

bool has_seen(const Clock& clock, Moment moment) {
  return moment.stream < clock.size() && clock[moment.stream] >= moment.time;
}

}  // namespace

size_t StreamClocks::add_stream() {
  streams_.emplace_back(streams_.size() + 1, 0);
  return streams_.size() - 1;
}

Moment StreamClocks::launch(size_t stream) {
  Clock& clock = streams_.at(stream);
  join(clock, host_);
  return {.stream = stream, .time = ++clock[stream]};
}

Clock StreamClocks::record(size_t stream) const {
  Clock clock = streams_.at(stream);
  join(clock, host_);
  return clock;
}

void StreamClocks::wait(size_t stream, const Clock& event) {
  join(streams_.at(stream), event);
}

void StreamClocks::host_waits(const Clock& event) {
  join(host_, event);
}

bool StreamClocks::is_over(Moment moment, size_t stream) const {
  return moment.stream == stream || has_seen(streams_.at(stream), moment) || has_seen(host_, moment);
}

bool StreamClocks::is_over_for_host(Moment moment) const {
  return has_seen(host_, moment);
}

Moment StreamClocks::last(size_t stream) const {
  return {.stream = stream, .time = streams_.at(stream)[stream]};
}

}  // namespace tessera::simulated_gpu
