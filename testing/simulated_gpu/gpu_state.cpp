#include "testing/simulated_gpu/gpu_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "testing/simulated_gpu/simulated_gpu.h"

namespace tessera::simulated_gpu {

namespace {

/// Reports errors at the end of a program that no op has thrown.
struct LastWord {
  ~LastWord() {
    const std::string fault = GpuState::instance().take_fault();
    if (!fault.empty()) {
      fmt::print(stderr, "simulated GPU: {}\n", fault);
      std::fflush(nullptr);
      _exit(1);
    }
  }
};

}  // namespace

GpuState& GpuState::instance() {
  static auto* const state = new GpuState;  // never destroyed, because static tensors may outlive it
  static const LastWord last_word;
  return *state;
}

c10::Stream GpuState::new_stream(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), next_id_++);
}

size_t GpuState::stream_number(const c10::Stream& stream) {
  const auto [place, is_new] = numbers_.try_emplace({stream.device_index(), stream.id()}, 0);
  if (is_new) {
    place->second = clocks_.add_stream();
  }
  return place->second;
}

EventPlace GpuState::record(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  const size_t number = stream_number(stream);
  const bool is_captured = capture_ && capture_->streams.contains(number);
  return {.clock = clocks_.record(number), .graph = is_captured ? capture_->graph.number : 0};
}

void GpuState::wait(const c10::Stream& stream, const EventPlace& event) {
  const std::lock_guard lock(mutex_);
  const size_t number = stream_number(stream), graph = capture_ ? capture_->graph.number : 0;
  TESSERA_CHECK(Error, event.graph == 0 || event.graph == graph,
                "simulated GPU: a stream waits for an event that was recorded in a capture which is over");
  TESSERA_CHECK(Error, event.graph != 0 || !capture_ || !capture_->streams.contains(number),
                "simulated GPU: a captured stream waits for an event that was recorded outside of the capture");
  if (event.graph != 0) {
    capture_->streams.insert(number);
  }
  clocks_.wait(number, event.clock);
}

void GpuState::check_host_may_wait(const std::string& place) const {
  TESSERA_CHECK(Error, !capture_, "simulated GPU: {} waits for the device while a stream is captured", place);
}

void GpuState::host_waits(const EventPlace& event, const std::string& place) {
  const std::lock_guard lock(mutex_);
  check_host_may_wait(place);
  clocks_.host_waits(event.clock);
  deliver_to_host();
  waits_.push_back(place);
}

void GpuState::host_waits_for(const c10::Stream& stream, const std::string& place) {
  host_waits(record(stream), place);
}

void GpuState::host_waits_for_device(c10::DeviceIndex device, const std::string& place) {
  const std::lock_guard lock(mutex_);
  check_host_may_wait(place);
  for (const auto& [stream, number] : numbers_) {
    if (stream.first == device) {
      clocks_.host_waits(clocks_.record(number));
    }
  }
  deliver_to_host();
  waits_.push_back(place);
}

std::vector<std::string> GpuState::waits() {
  const std::lock_guard lock(mutex_);
  return waits_;
}

void GpuState::forget_waits() {
  const std::lock_guard lock(mutex_);
  waits_.clear();
}

void GpuState::launch(const c10::Stream& stream, const char* op, const std::vector<TouchedBytes>& touched) {
  const std::lock_guard lock(mutex_);
  const size_t number = stream_number(stream);
  TESSERA_CHECK(Error, !capture_ || capture_->streams.contains(number),
                "simulated GPU: {} on a stream that has not joined the capture: it would run now, and in no replay",
                op);
  launch(number, op, touched, /*graph=*/0);
}

/// `graph` is the replayed graph; memory freed in it remains its own.
void GpuState::launch(size_t stream, const char* op, const std::vector<TouchedBytes>& touched, size_t graph) {
  TESSERA_CHECK(Error, fault_.empty(), "simulated GPU: {}", std::exchange(fault_, ""));
  const Moment moment = clocks_.launch(stream);
  for (const auto& [address, bytes, writes] : touched) {
    MemoryBlock& block = memory_.find_block(address);
    const size_t begin = static_cast<const char*>(address) - static_cast<const char*>(memory_.device_address(block));
    const Access access{.moment = moment, .begin = begin, .end = begin + bytes, .writes = writes, .op = op};
    if (block.is_free && graph != 0 && block.graph == graph) {
      continue;
    }
    TESSERA_CHECK(Error, !block.is_free, "simulated GPU: {} of a block that was freed", describe(access));
    if (const auto earlier = block.accesses.find_race(access, clocks_)) {
      TESSERA_CHECK(Error, false,
                    "simulated GPU: {} of a block of {}, without waiting until {}; record an event there, and let this "
                    "stream wait for it",
                    describe(access), block.bytes, describe(*earlier));
    }
    block.accesses.add(access, clocks_);
  }
}

void GpuState::begin_capture(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  TESSERA_CHECK(Error, !capture_, "simulated GPU: a graph is captured already");
  const size_t origin = stream_number(stream);
  capture_ = Capture{.origin = origin,
                     .streams = {origin},
                     .memory = memory_.save(),
                     .generator = at::detail::getDefaultCPUGenerator().get_state(),
                     .graph = {.number = ++graphs_}};
}

bool GpuState::is_capturing() {
  const std::lock_guard lock(mutex_);
  return capture_.has_value();
}

void GpuState::add_graph_work(GraphWork work) {
  const std::lock_guard lock(mutex_);
  capture_.value().graph.work.push_back(std::move(work));
}

Graph GpuState::finish_capture() {
  auto capture = *std::exchange(capture_, std::nullopt);
  memory_.restore(capture.memory);
  auto generator = at::detail::getDefaultCPUGenerator();  // also the simulated GPU's
  generator.set_state(capture.generator);
  return std::move(capture.graph);
}

Graph GpuState::end_capture() {
  const std::lock_guard lock(mutex_);
  const size_t origin = capture_.value().origin;
  const bool is_joined = std::ranges::all_of(
      capture_->streams, [&](size_t stream) { return clocks_.is_over(clocks_.last(stream), origin); });
  auto graph = finish_capture();
  TESSERA_CHECK(Error, is_joined, "simulated GPU: the captured stream does not wait for a stream that has joined it");
  return graph;
}

void GpuState::abandon_capture() {
  const std::lock_guard lock(mutex_);
  if (capture_) {
    finish_capture();
  }
}

void GpuState::replay(const Graph& graph, const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  for (const auto& work : graph.work) {
    launch(stream_number(stream), work.op.c_str(), work.touched, graph.number);
    work.run();
  }
}

template <class IsDue>
void GpuState::deliver(const IsDue& is_due) {
  std::erase_if(deliveries_, [&](const Delivery& delivery) {
    if (!is_due(delivery)) {
      return false;
    }
    delivery.bytes.copy(delivery.to, delivery.bytes.size());
    return true;
  });
}

void GpuState::deliver_to_host() {
  deliver([&](const Delivery& delivery) { return clocks_.is_over_for_host(delivery.moment); });
}

void GpuState::deliver_for(const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  deliver([&](const Delivery& delivery) { return clocks_.is_over(delivery.moment, stream_number(stream)); });
}

void GpuState::deliver_later(const c10::Stream& stream, void* host_address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto* const to = static_cast<char*>(host_address);
  deliveries_.push_back({.moment = clocks_.last(stream_number(stream)), .to = to, .bytes = std::string(to, bytes)});
  std::memset(to, 0xff, bytes);
}

void GpuState::drop_deliveries(const void* host_address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto* const begin = static_cast<const char*>(host_address);
  std::erase_if(deliveries_,
                [&](const Delivery& delivery) { return delivery.to >= begin && delivery.to < begin + bytes; });
}

void* GpuState::allocate(size_t bytes, const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  return memory_.allocate(bytes, stream_number(stream), capture_ ? capture_->graph.number : 0);
}

void GpuState::free(void* device_address) noexcept {
  const std::lock_guard lock(mutex_);
  MemoryBlock& block = memory_.find_block(device_address);
  for (const size_t stream : block.recorded) {
    block.accesses.forgive(stream);
  }
  const auto open = block.accesses.find_open(block.stream, clocks_);
  if (open) {
    fault_ = fmt::format("a block of {} bytes of stream {} was freed before that stream waits until {}", block.bytes,
                         block.stream, describe(*open));
    block.accesses = {};  // so that it is reported once
  }
  memory_.free(block);
}

void GpuState::record_stream(const void* device_address, const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  memory_.find_block(device_address).recorded.push_back(stream_number(stream));
}

std::string GpuState::take_fault() {
  const std::lock_guard lock(mutex_);
  return std::exchange(fault_, "");
}

std::vector<std::string> host_waits() {
  return GpuState::instance().waits();
}

void forget_host_waits() {
  GpuState::instance().forget_waits();
}

}  // namespace tessera::simulated_gpu
