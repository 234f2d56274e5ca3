// Runs every op on tensors of a simulated GPU with ATen's CPU kernel, and reports the accessed memory to the GPU.

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "base/error.h"
#include "testing/simulated_gpu/gpu_state.h"
#include "testing/simulated_gpu/host_twins.h"

namespace tessera::simulated_gpu {

namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
}

c10::Device current_device() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

/// Replaces each tensor for which `visit` returns another one.
template <class Visit>
void replace_tensors(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    value = c10::IValue(visit(value.toTensor()));
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> replaced;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      replaced.push_back(visit(tensor));
    }
    value = c10::IValue(std::move(replaced));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      replaced.push_back(tensor ? std::optional(visit(*tensor)) : std::nullopt);
    }
    value = c10::IValue(std::move(replaced));
  }
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Returns whether the op accesses no memory: its result is a view, or it turns its operand into one.
bool makes_view(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::inplace_view) ||
         std::ranges::any_of(op.schema().returns(), [](const c10::Argument& result) {
           return result.alias_info() != nullptr && !result.alias_info()->isWrite();
         });
}

/// Returns whether the host waits, because the result's size or host value depends on data.
bool waits_for_device(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
         std::ranges::any_of(op.schema().returns(), [](const c10::Argument& result) {
           const auto kind = result.type()->kind();
           return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType;
         });
}

/// Returns the bytes from the first element in memory to the last, contiguous or not.
TouchedBytes touched_bytes(const at::Tensor& tensor, bool written) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {.device_address = tensor.const_data_ptr(),
          .bytes = static_cast<size_t>(elements) * tensor.element_size(),
          .writes = written};
}

/// Operands of one op.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema_(op.schema()), stack_(stack), makes_view_(makes_view(op)) {
    const size_t count = schema_.arguments().size();
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack_)[stack_->size() - count + i];
      if (value.isDevice() && value.toDevice().is_cuda()) {
        device_ = value.toDevice();
        value = c10::IValue(c10::Device(c10::kCPU));
      } else {
        replace_tensors(value,
                        [&](const at::Tensor& tensor) { return operand(tensor, writes(schema_.arguments()[i])); });
      }
    }
  }

  c10::Device device() const {
    return !twins_.operands().empty() ? twins_.operands()[0].device() : device_.value_or(current_device());
  }

  void launch() {
    if (!makes_view_) {
      GpuState::instance().launch(current_stream(device()), schema_.name().c_str(), touched_);
    }
  }

  void put_results() {
    twins_.update_written();
    for_each_result(*stack_, [&](const at::Tensor& tensor) {
      at::Tensor result = twins_.result(tensor, device());
      new_results_.push_back(find_new_memory(result, tensor));
      return result;
    });
  }

  /// Records arguments, and results' memory, in the form that the host kernel needs.
  void begin_record() {
    if (GpuState::instance().is_capturing() && !makes_view_) {
      arguments_.emplace(stack_->end() - static_cast<std::ptrdiff_t>(schema_.arguments().size()), stack_->end());
    }
  }
  void end_record(const c10::OperatorHandle& op) {
    if (!arguments_) {
      return;
    }
    GpuState::instance().add_graph_work(
        {.op = schema_.name(), .touched = touched_, .run = [op, arguments = *arguments_, results = new_results_] {
           run_again(op, arguments, results);
         }});
  }

 private:
  /// Replaces each defined tensor.
  template <class Visit>
  void for_each_result(torch::jit::Stack& stack, const Visit& visit) const {
    visit_results(schema_, stack, visit);
  }

  template <class Visit>
  static void visit_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const Visit& visit) {
    const size_t count = schema.returns().size();
    for (size_t i = 0; i < count; ++i) {
      replace_tensors(stack[stack.size() - count + i],
                      [&](const at::Tensor& tensor) { return tensor.defined() ? visit(tensor) : tensor; });
    }
  }

  /// Returns the memory of a result that the kernel did not write itself; null if it did.
  static void* find_new_memory(const at::Tensor& result, const at::Tensor& on_host) {
    void* const address = GpuState::instance().host_address(result.storage().data());
    return address == on_host.storage().data() ? nullptr : address;
  }

  static void run_again(const c10::OperatorHandle& op, torch::jit::Stack stack, const std::vector<void*>& results) {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    size_t next = 0;
    visit_results(op.schema(), stack, [&](const at::Tensor& tensor) {
      if (void* const to = results.at(next++)) {
        std::memcpy(to, tensor.storage().data(), tensor.storage().nbytes());
      }
      return tensor;
    });
  }

  at::Tensor operand(const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    if (tensor.numel() != 0) {
      touched_.push_back(touched_bytes(tensor, written));
    }
    return twins_.twin(tensor, written);
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack* const stack_;
  const bool makes_view_;
  HostTwins twins_;
  std::vector<TouchedBytes> touched_;
  std::optional<c10::Device> device_;
  std::optional<torch::jit::Stack> arguments_;  // during graph capture
  std::vector<void*> new_results_;
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Call call(op, stack);
  const c10::DeviceGuard guard(call.device());
  call.launch();
  call.begin_record();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (waits_for_device(op)) {
    GpuState::instance().host_waits_for(current_stream(call.device()), op.schema().name());
  }
  call.put_results();
  call.end_record(op);
}

/// Returns whether a copy blocks the host: unless its memory is pinned and the caller set non_blocking.
bool copy_waits(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  return (!to.is_cuda() && !(non_blocking && to.is_pinned())) || (!from.is_cuda() && !non_blocking);
}

/// Returns whether a copy to the host continues asynchronously.
bool is_delivered_later(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  return non_blocking && from.is_cuda() && !to.is_cuda() && to.is_pinned() && to.is_contiguous() && to.numel() != 0;
}

/// Copies between GPUs on the source's stream; the current streams of both wait for each other.
at::Tensor& copy_between_gpus(at::Tensor& to, const at::Tensor& from) {
  auto& state = GpuState::instance();
  TESSERA_CHECK(NotImplementedError, !state.is_capturing(),
                "simulated GPU: a copy between GPUs, which is not simulated in a capture");
  const c10::Stream source = current_stream(from.device()), target = current_stream(to.device());
  state.wait(source, state.record(target));
  if (to.numel() != 0) {
    state.launch(source, "aten::copy_", {touched_bytes(to, /*written=*/true), touched_bytes(from, false)});
  }
  state.wait(target, state.record(source));
  HostTwins from_twins, to_twins;
  to_twins.twin(to).copy_(from_twins.twin(from));
  return to;
}

void copy_(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t first = stack->size() - 3;
  at::Tensor to = (*stack)[first].toTensor();
  const at::Tensor from = (*stack)[first + 1].toTensor();
  const bool non_blocking = (*stack)[first + 2].toBool();
  if (to.is_cuda() && from.is_cuda() && to.device() != from.device()) {
    const at::AutoDispatchBelowADInplaceOrView below;
    copy_between_gpus(to, from.expand_as(to));
    stack->resize(first);
    stack->emplace_back(to);
    return;
  }
  auto& state = GpuState::instance();
  const c10::Stream stream = current_stream(to.is_cuda() ? to.device() : from.device());
  state.deliver_for(stream);
  run(op, stack);
  TESSERA_CHECK(NotImplementedError, to.is_cuda() || !state.is_capturing(),
                "simulated GPU: a copy to the host, which is not simulated in a capture");
  if (is_delivered_later(to, from, non_blocking)) {
    state.deliver_later(stream, to.mutable_data_ptr(), to.nbytes());
  } else if (copy_waits(to, from, non_blocking)) {
    state.host_waits_for(stream, op.schema().name());
  }
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*pin_memory*/,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kCUDA), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> /*pin_memory*/) {
  const c10::DeviceGuard guard(device.value_or(current_device()));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::kCUDA),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                        c10::SymIntArrayRef strides) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, std::move(offset));
  return tensor;
}

/// Returns ops that would bypass the fallback because they have a kernel for all devices: real devices have a separate
/// kernel, or it calls a device library.
std::vector<c10::OperatorName> ops_to_take_from_cpu() {
  std::vector<c10::OperatorName> ops = {
      {"aten::convolution", ""}, {"aten::_convolution", ""}, {"aten::convolution_backward", ""}};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() == "aten" && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
      ops.push_back(name);
    }
  }
  return ops;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy_>());
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", &record_stream);
  for (const c10::OperatorName& name : ops_to_take_from_cpu()) {
    library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
  library.impl("set_.source_Storage_storage_offset", &set_storage);
}

}  // namespace

}  // namespace tessera::simulated_gpu
