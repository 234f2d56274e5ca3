#include "dtensor/propagation/output_metas.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>

#include <algorithm>

namespace tessera {

namespace {

/// Returns a tensor with the number of dims of `meta`, all of size 1.
at::Tensor one_element(const TensorMeta& meta) {
  return at::ones(DimVector(meta.sizes.size(), 1), at::TensorOptions().dtype(meta.dtype));
}

/// Treatment of plain CPU tensors that are numbers. Most ops accept them with tensors of any device, and some read
/// them; the others get stand-ins. Numbers on another GPU or meta must be on the device.
enum class Numbers { OfCpuStay, AllReplaced };

bool stays(const at::Tensor& number, c10::DeviceType device, Numbers numbers) {
  return number.device().type() == device || (number.is_cpu() && numbers == Numbers::OfCpuStay);
}

/// Returns `stand_in` for `number`, with the same weight in type promotion.
at::Tensor with_promotion_weight(const at::Tensor& number, at::Tensor stand_in) {
  if (number.unsafeGetTensorImpl()->is_wrapped_number()) {
    stand_in.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return stand_in;
}

/// Returns the arguments, with operands replaced by stand-ins that `make` creates on `device`.
template <class Make>
torch::jit::Stack stand_in_arguments(const OpCall& call, c10::DeviceType device, Make make,
                                     Numbers numbers = Numbers::OfCpuStay) {
  torch::jit::Stack stack(call.args.begin(), call.args.end());
  size_t next = 0;
  const auto& schema = call.op.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor()) {
      if (next < call.operands.size() && call.operands[next].arg == i) {
        const auto& operand = call.operands[next++];
        if (operand.spec) {
          value = make(operand.meta);
        } else if (!stays(value.toTensor(), device, numbers)) {
          value = with_promotion_weight(value.toTensor(), make(operand.meta));
        }
      }
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (; next < call.operands.size() && call.operands[next].arg == i; ++next) {
        tensors.push_back(make(call.operands[next].meta));
      }
      value = c10::IValue(tensors);
    } else if (value.isList() && next < call.operands.size() && call.operands[next].arg == i) {
      auto list = value.toList().copy();  // Tensor?[]: undefined entries stay
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue& entry = list.get(k);
        if (entry.isTensor() && entry.toTensor().defined()) {
          list.set(k, c10::IValue(make(call.operands[next++].meta)));
        }
      }
      value = c10::IValue(list);
    } else if (schema[i].name() == "device" && value.isDevice()) {
      value = c10::Device(device);
    } else if (schema[i].name() == "pin_memory") {
      value = c10::IValue();
    }
  }
  return stack;
}

/// Returns the defined tensors of an op's results, with lists expanded.
std::vector<at::Tensor> result_tensors(const torch::jit::Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : results) {
    if (value.isTensor() && value.toTensor().defined()) {
      tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorVector();
      tensors.insert(tensors.end(), list.begin(), list.end());
    }
  }
  return tensors;
}

std::vector<TensorMeta> make_metas(const std::vector<at::Tensor>& tensors) {
  std::vector<TensorMeta> metas;
  metas.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    metas.push_back(TensorMeta::of(tensor));
  }
  return metas;
}

bool has_plain_number(const OpCall& call) {
  return std::ranges::any_of(call.operands, [](const Operand& operand) { return !operand.spec; });
}

/// Returns the op's results for meta tensors. Some ops reject CPU numbers among these.
std::vector<at::Tensor> results_on_meta(const OpCall& call) {
  const auto run = [&](Numbers numbers) {
    auto stack = stand_in_arguments(call, at::kMeta, meta_tensor, numbers);
    call.op.callBoxed(stack);
    return result_tensors(stack);
  };
  try {
    return run(Numbers::OfCpuStay);
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const c10::Error&) {
    if (!has_plain_number(call)) {
      throw;
    }
    try {
      return run(Numbers::AllReplaced);
    } catch (const c10::Error&) {  // the first error is more informative if the op reads the number
    }
    throw;
  }
}

}  // namespace

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided(meta.sizes, meta.strides, at::TensorOptions().dtype(meta.dtype).device(at::kMeta));
}

std::vector<TensorMeta> infer_output_metas(const OpCall& call, std::vector<int64_t>* offsets) {
  const auto tensors = results_on_meta(call);
  for (size_t i = 0; offsets && i < tensors.size(); ++i) {
    offsets->push_back(tensors[i].storage_offset());
  }
  return make_metas(tensors);
}

std::vector<TensorMeta> probe_output_metas(const OpCall& call,
                                           const std::function<DimVector(const TensorMeta&)>& sizes) {
  const auto device = call.operands[0].spec->mesh().device_type();
  auto stack = stand_in_arguments(call, device, [&](const TensorMeta& meta) {
    return at::ones(sizes(meta), at::TensorOptions().dtype(meta.dtype).device(device));
  });
  call.op.callBoxed(stack);
  return make_metas(result_tensors(stack));
}

std::vector<at::ScalarType> infer_output_dtypes(const OpCall& call) {
  auto stack = stand_in_arguments(call, at::kCPU, one_element);
  call.op.callBoxed(stack);
  std::vector<at::ScalarType> dtypes;
  for (const auto& tensor : result_tensors(stack)) {
    dtypes.push_back(tensor.scalar_type());
  }
  return dtypes;
}

bool plan_output_metas(const OpRule& rule, OpCall& call) {
  if (rule.requires_replicated && rule.requires_replicated(call)) {
    return false;
  }
  if (rule.output_metas) {
    call.outputs = rule.output_metas(call);
    return true;
  }
  try {
    call.outputs = infer_output_metas(call, &call.offsets);
    return true;
  } catch (const c10::NotImplementedError&) {
    return false;
  }
}

}  // namespace tessera
