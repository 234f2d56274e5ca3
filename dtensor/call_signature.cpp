#include "dtensor/call_signature.h"

#include <c10/core/TensorImpl.h>

#include "base/hash.h"
#include "dtensor/propagate.h"

namespace tessera {

namespace {

/// Plans are dropped together beyond this many: programs with ever-changing sizes must not grow for ever.
constexpr size_t kMaxCachedPlans = 1 << 16;

OpInfo make_info(const c10::OperatorHandle& op) {
  OpInfo info;
  info.rule = find_op_rule(op.operator_name());
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    info.written_args.push_back(is_written(argument));
    info.writes = info.writes || is_written(argument);
  }
  for (const auto& result : schema.returns()) {
    OpInfo::Return entry;
    entry.is_view = result.alias_info() != nullptr && !is_written(result);
    if (is_written(result)) {
      for (size_t arg = 0; arg < schema.arguments().size(); ++arg) {
        const auto* alias = schema.arguments()[arg].alias_info();
        if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) {
          entry.written_arg = static_cast<int64_t>(arg);
        }
      }
    }
    info.returns.push_back(entry);
  }
  return info;
}

/// A plain 0-dim tensor decides type promotion, so its dtype and whether it wraps a number are part of the key.
int64_t scalar_tensor_key(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.scalar_type()) * 2 + (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 1 : 0);
}

bool is_key_scalar(const c10::IValue& value) {
  return value.isNone() || value.isInt() || value.isBool() || value.isDouble() || value.isIntList() ||
         value.isBoolList() || value.isDoubleList() || value.isString() || value.isDevice() || value.isComplexDouble();
}

bool holds_tensors(const c10::IValue& value) {
  if (value.isTensor() || value.isTensorList()) {
    return true;
  }
  return value.isList() && value.toList().elementType()->str().find("Tensor") != std::string::npos;
}

uint64_t hash_scalar(const c10::IValue& value) {
  if (value.isNone()) {
    return 1;
  }
  if (value.isInt()) {
    return hash_combine(2, static_cast<uint64_t>(value.toInt()));
  }
  if (value.isBool()) {
    return value.toBool() ? 3 : 4;
  }
  if (value.isDouble()) {
    return hash_combine(5, hash_double(value.toDouble()));
  }
  if (value.isIntList()) {
    uint64_t hash = 6;
    for (const int64_t element : value.toIntList()) {
      hash = hash_combine(hash, static_cast<uint64_t>(element));
    }
    return hash;
  }
  if (value.isDevice()) {
    return hash_combine(7, static_cast<uint64_t>(value.toDevice().type()));
  }
  return 8;  // rare kinds share a hash and are told apart by comparison
}

bool same_scalar(const c10::IValue& a, const c10::IValue& b) {
  if (a.isInt() && b.isInt()) {
    return a.toInt() == b.toInt();
  }
  if (a.isDouble() && b.isDouble()) {
    return hash_double(a.toDouble()) == hash_double(b.toDouble());
  }
  if (a.isDoubleList() && b.isDoubleList()) {
    return a.toDoubleVector() == b.toDoubleVector();
  }
  return a.type()->kind() == b.type()->kind() && a == b;
}

}  // namespace

const OpInfo& OpInfo::of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<OpInfo>> infos;
  auto& info = infos[&op.schema()];
  if (!info) {
    info = std::make_unique<OpInfo>(make_info(op));
  }
  return *info;
}

CallSignature::CallSignature(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : info(&OpInfo::of(op)), args(torch::jit::last(stack, op.schema().arguments().size())) {
  hash = hash_combine(0, reinterpret_cast<uint64_t>(info));
  size_t list_size = 0;
  for (const auto& value : args) {
    list_size += value.isList() && holds_tensors(value) ? value.toListRef().size() : 0;
  }
  list_tensors_.reserve(list_size);  // operands point into it
  for (size_t arg = 0; arg < args.size(); ++arg) {
    const auto& value = args[arg];
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        add(arg, 0, value.toTensor());
      }
    } else if (value.isList() && holds_tensors(value)) {
      size_t index = 0;
      for (const auto& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) {
          list_tensors_.push_back(element.toTensor());
          add(arg, index, list_tensors_.back());
        }
        ++index;
      }
    } else {
      add_scalar(value);
    }
  }
}

void CallSignature::add(size_t arg, size_t index, const at::Tensor& tensor) {
  const auto* dtensor = dtensor_meta(tensor);
  operands.push_back({.arg = arg, .index = index, .tensor = &tensor, .dtensor = dtensor});
  hash = hash_combine(hash, arg << 32 | index);
  if (dtensor) {
    hash = hash_combine(hash, dtensor->spec->hash());
  } else {
    mixed = mixed || tensor.dim() > 0 || info->is_written(arg);
    hash = hash_combine(hash, static_cast<uint64_t>(scalar_tensor_key(tensor)));
  }
}

void CallSignature::add_scalar(const c10::IValue& value) {
  cacheable = cacheable && is_key_scalar(value);
  hash = hash_combine(hash, hash_scalar(value));
}

bool PlanCache::matches(const Entry& entry, const CallSignature& call) {
  if (entry.info != call.info || entry.operands.size() != call.operands.size()) {
    return false;
  }
  size_t scalar = 0;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto& operand = call.operands[i];
    const auto& key = entry.operands[i];
    if (key.arg != operand.arg || key.index != operand.index || (key.spec != nullptr) != (operand.dtensor != nullptr)) {
      return false;
    }
    if (key.spec && !same_spec(key.spec, operand.dtensor->spec)) {
      return false;
    }
    if (!key.spec && entry.scalars[scalar++].toInt() != scalar_tensor_key(*operand.tensor)) {
      return false;
    }
  }
  for (const auto& value : call.args) {
    if (!holds_tensors(value) && !same_scalar(entry.scalars[scalar++], value)) {
      return false;
    }
  }
  return true;
}

const std::shared_ptr<const OpPlan>* PlanCache::find(const CallSignature& call) const {
  const auto found = entries_.find(call.hash);
  if (found == entries_.end() || !call.cacheable) {
    return nullptr;
  }
  for (const auto& entry : found->second) {
    if (matches(entry, call)) {
      return &entry.plan;
    }
  }
  return nullptr;
}

void PlanCache::insert(const CallSignature& call, std::shared_ptr<const OpPlan> plan) {
  Entry entry{.info = call.info, .operands = {}, .scalars = {}, .plan = std::move(plan)};
  for (const auto& operand : call.operands) {
    entry.operands.push_back({operand.arg, operand.index, operand.dtensor ? operand.dtensor->spec : SpecPtr()});
    if (!operand.dtensor) {
      entry.scalars.emplace_back(scalar_tensor_key(*operand.tensor));
    }
  }
  for (const auto& value : call.args) {
    if (!holds_tensors(value)) {
      entry.scalars.push_back(value);
    }
  }
  if (entries_.size() >= kMaxCachedPlans) {
    entries_.clear();
  }
  entries_[call.hash].push_back(std::move(entry));
}

}  // namespace tessera
