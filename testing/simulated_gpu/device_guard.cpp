// Device interface for libtorch: current device and streams, events, memory, hooks.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "testing/simulated_gpu/gpu_state.h"
#include "testing/simulated_gpu/pinned_memory.h"
#include "testing/simulated_gpu/simulated_gpu.h"

namespace tessera::simulated_gpu {

namespace {

thread_local c10::DeviceIndex current_device_index = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};  // 0: the default one

void check_index(c10::DeviceIndex device) {
  TESSERA_CHECK(ValueError, device >= 0 && device < kDevices, "cuda:{}: there are {} simulated GPUs", device, kDevices);
}

c10::DeviceIndex device_index(c10::Device device) {
  const c10::DeviceIndex index = device.has_index() ? device.index() : current_device_index;
  check_index(index);
  return index;
}

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

/// Position of a stream, and the host's time of recording: kernels take no time themselves.
struct Event {
  EventPlace place;
  std::chrono::steady_clock::time_point recorded;
};

Event& to_event(void* event) {
  return *static_cast<Event*>(event);
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device_index}; }
  void setDevice(c10::Device device) const override { current_device_index = device_index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device_index = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kCUDA, std::exchange(current_device_index, device_index(device))};
  }

  c10::Stream getStream(c10::Device device) const override {
    return make_stream(device_index(device), current_streams[static_cast<size_t>(device_index(device))]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(device_index(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return GpuState::instance().new_stream(device_index(device));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return GpuState::instance().new_stream(device_index(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    check_index(stream.device_index());
    auto& current = current_streams[static_cast<size_t>(stream.device_index())];
    return make_stream(stream.device_index(), std::exchange(current, stream.id()));
  }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    GpuState::instance().host_waits_for(stream, "Stream::synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    GpuState::instance().host_waits_for_device(device, "synchronizeDevice");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    to_event(*event) = {GpuState::instance().record(stream), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      GpuState::instance().wait(stream, to_event(event).place);
    }
  }
  bool queryEvent(void* /*event*/) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      GpuState::instance().host_waits(to_event(event).place, "Event::synchronize");
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex /*device*/) const override {
    return std::chrono::duration<double, std::milli>(to_event(end).recorded - to_event(begin).recorded).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (memory.get() != nullptr) {
      GpuState::instance().record_stream(memory.get(), stream);
    }
  }
};

void free_device_memory(void* address) {
  GpuState::instance().free(address);
}

/// Allocates like CUDA's caching allocator: for the current device and its current stream.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::kCUDA, current_device_index);
    if (bytes == 0) {
      return {nullptr, device};
    }
    void* const address = GpuState::instance().allocate(bytes, GuardImpl().getStream(device));
    return {address, address, &free_device_memory, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto& state = GpuState::instance();
    default_copy_data(state.host_address(to), state.host_address(from), bytes);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs /*unused*/) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current_device_index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device_index; }
  void setCurrentDevice(c10::DeviceIndex device) const override { GuardImpl().setDevice({c10::kCUDA, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return GuardImpl().exchangeDevice({c10::kCUDA, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override { GuardImpl().synchronizeDevice(device); }

  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }

  /// Uses the CPU's random numbers.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
    return at::make_generator<at::CPUGeneratorImpl>(at::default_rng_seed_val);
  }
};

const bool allocators_are_set = [] {
  static DeviceAllocator allocator;
  c10::SetAllocator(c10::kCUDA, &allocator);
  at::setHostAllocator(c10::kCUDA, &pinned_allocator());
  return true;
}();

C10_REGISTER_GUARD_IMPL(CUDA, GuardImpl)
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

}  // namespace

}  // namespace tessera::simulated_gpu
