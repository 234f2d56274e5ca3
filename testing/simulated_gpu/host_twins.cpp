#include "testing/simulated_gpu/host_twins.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "base/error.h"

namespace tessera::simulated_gpu {

namespace {

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) {
    impl->_set_conj(true);
  }
  if (like.is_neg()) {
    impl->_set_neg(true);
  }
  return tensor;
}

c10::Storage device_storage(const c10::Storage& host, c10::Device device) {
  const c10::DeviceGuard guard(device);
  auto* const allocator = c10::GetAllocator(c10::kCUDA);
  c10::DataPtr memory = allocator->allocate(host.nbytes());
  if (host.nbytes() != 0) {
    std::memcpy(GpuState::instance().host_address(memory.get()), host.data(), host.nbytes());
  }
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(memory), allocator, /*resizable=*/true};
}

c10::Storage host_storage(const c10::Storage& device) {
  void* const address = GpuState::instance().host_address(device.data());
  return {c10::Storage::use_byte_size_t(), device.nbytes(), c10::DataPtr(address, c10::kCPU), c10::GetCPUAllocator(),
          /*resizable=*/true};
}

}  // namespace

const HostTwins::Storage& HostTwins::find_or_add_storage(const at::Tensor& tensor) {
  const c10::Storage& device = tensor.storage();
  const auto [place, is_new] = by_device_storage_.try_emplace(device.unsafeGetStorageImpl());
  if (is_new) {
    place->second = {.device = device, .host = host_storage(device)};
    by_host_storage_[place->second.host.unsafeGetStorageImpl()] = place->second;
  }
  return place->second;
}

at::Tensor HostTwins::twin(const at::Tensor& tensor, bool is_written) {
  TESSERA_CHECK(NotImplementedError, tensor.layout() == at::kStrided && !tensor.is_quantized(),
                "simulated GPU: a tensor of layout {}; only dense ones are simulated",
                static_cast<int>(tensor.layout()));
  TESSERA_CHECK(ValueError, operands_.empty() || operands_[0].device() == tensor.device(),
                "simulated GPU: an op on tensors of {} and {}", operands_.at(0).device().str(), tensor.device().str());
  if (is_written) {
    written_.push_back(operands_.size());
  }
  operands_.push_back(tensor);
  twins_.push_back(tensor_over(find_or_add_storage(tensor).host, c10::DispatchKey::CPU, tensor));
  return twins_.back();
}

void HostTwins::update_written() {
  for (const size_t i : written_) {
    const at::Tensor& twin = twins_.at(i);
    auto* const impl = operands_[i].unsafeGetTensorImpl();
    auto* const storage = impl->unsafe_storage().unsafeGetStorageImpl();
    if (twin.storage().data() != GpuState::instance().host_address(storage->data())) {  // the op resized it
      c10::Storage moved = device_storage(twin.storage(), operands_[i].device());
      storage->set_nbytes(moved.nbytes());
      storage->set_data_ptr_noswap(moved.set_data_ptr(c10::DataPtr(nullptr, operands_[i].device())));
    }
    if (twin.sizes() != operands_[i].sizes() || twin.strides() != operands_[i].strides() ||
        twin.storage_offset() != operands_[i].storage_offset()) {
      impl->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
    }
  }
}

at::Tensor HostTwins::result(const at::Tensor& result, c10::Device device) {
  for (size_t i = 0; i < twins_.size(); ++i) {
    if (result.is_same(twins_[i])) {
      return operands_[i];
    }
  }
  const auto shared = by_host_storage_.find(result.storage().unsafeGetStorageImpl());
  return tensor_over(
      shared != by_host_storage_.end() ? shared->second.device : device_storage(result.storage(), device),
      c10::DispatchKey::CUDA, result);
}

}  // namespace tessera::simulated_gpu
