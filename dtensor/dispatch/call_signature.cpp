#include "dtensor/dispatch/call_signature.h"

#include <c10/core/DefaultDtype.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_map>

#include "base/hash.h"
#include "dtensor/dispatch/functional_variant.h"
#include "dtensor/propagation/op_names.h"
#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

OpInfo::ArgKind arg_kind(const c10::TypePtr& type) {
  if (const auto optional = type->cast<c10::OptionalType>()) {
    return arg_kind(optional->getElementType());
  }
  if (const auto list = type->cast<c10::ListType>()) {
    const bool of_tensors = arg_kind(list->getElementType()) == OpInfo::ArgKind::Tensor;
    return of_tensors ? OpInfo::ArgKind::TensorList : OpInfo::ArgKind::Scalar;
  }
  return type->kind() == c10::TypeKind::TensorType ? OpInfo::ArgKind::Tensor : OpInfo::ArgKind::Scalar;
}

/// ATen's ops that write an argument and also return a new tensor (rrelu's noise, running statistics) count no versions
/// on plain tensors either. Their gradients rely on it, because autograd saves the written tensor before the call.
bool counts_versions(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const bool returns_new = std::ranges::any_of(schema.returns(), [](const auto& r) { return !r.alias_info(); });
  return schema.is_mutable() && !op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView) &&
         !(returns_new && schema.name().starts_with("aten::"));
}

constexpr const char* kViewsOfSameElements = R"(
    alias detach permute select.int slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims t
    transpose.int unbind.int unsqueeze view _reshape_alias)";

bool views_same_elements(const c10::OperatorHandle& op) {
  static const std::vector<std::string> names = aten_ops(kViewsOfSameElements);
  return std::ranges::find(names, toString(op.operator_name())) != names.end();
}

OpInfo make_info(const c10::OperatorHandle& op) {
  OpInfo info;
  info.views_same_elements = views_same_elements(op);
  info.rule = find_op_rule(op.operator_name());
  info.reads_float_scalars = !info.rule || info.rule->reads_float_scalars;
  info.functional = info.rule ? std::nullopt : functional_variant(op);
  const auto& schema = op.schema();
  info.counts_versions = counts_versions(op);
  for (size_t arg = 0; arg < schema.arguments().size(); ++arg) {
    const auto& argument = schema.arguments()[arg];
    const bool written = is_written(argument) || (info.rule && info.rule->also_writes(arg));
    info.kinds.push_back(arg_kind(argument.real_type()));
    info.takes_lists = info.takes_lists || info.kinds.back() == OpInfo::ArgKind::TensorList;
    info.written_args.push_back(written ? 1 : 0);
    info.writes = info.writes || written;
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

/// Kinds of scalars that the hash and the comparison below handle.
bool is_key_scalar(const c10::IValue& value) {
  if (value.isList() && !value.toListRef().empty()) {
    const auto& first = value.toListRef()[0];
    return !first.isList() && is_key_scalar(first);
  }
  return value.isNone() || value.isInt() || value.isBool() || value.isDouble() || value.isList() || value.isString() ||
         value.isDevice() || value.isComplexDouble() || value.isGenerator();
}

/// Property of a number that rules may read even if its value is not part of the key: 0, finite, or neither.
enum class NumberKind : uint8_t { Zero, Finite, NotFinite };

NumberKind number_kind(double number) {
  return number == 0 ? NumberKind::Zero : std::isfinite(number) ? NumberKind::Finite : NumberKind::NotFinite;
}

/// Uses one multiplication per value. Inputs are hashes, addresses and small numbers; calls with equal hashes are
/// distinguished by comparison.
uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 32);
}

uint64_t hash_scalar(const c10::IValue& value, bool float_values) {
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
    const double number = value.toDouble();
    return float_values ? hash_combine(5, hash_double(number)) : 8 + static_cast<uint64_t>(number_kind(number));
  }
  if (value.isIntList()) {
    uint64_t hash = 6;
    for (const auto& element : value.toListRef()) {
      hash = mix(hash, static_cast<uint64_t>(element.toInt()));
    }
    return hash;
  }
  if (value.isDevice()) {
    return hash_combine(7, static_cast<uint64_t>(value.toDevice().type()));
  }
  return 5;  // rare kinds share a hash and are distinguished by comparison
}

/// Table of the calling thread. Programs repeat few ops, so most lookups need no chains. It has no constructor, so that
/// a lookup need not check whether one ran.
struct RecentInfos {
  struct Slot {
    const c10::FunctionSchema* schema;
    const OpInfo* info;
  };
  std::array<Slot, 256> slots;
  uint64_t version;
};
constinit thread_local RecentInfos recent_infos{};

[[gnu::noinline]] const OpInfo* look_up_info(const c10::OperatorHandle& op, uint64_t now) {
  thread_local std::unordered_map<const c10::FunctionSchema*, const OpInfo*> infos;
  thread_local std::vector<std::unique_ptr<const OpInfo>> all;  // with outdated ones, to which cached plans refer
  thread_local uint64_t version = 0;
  if (version != now) {
    infos.clear();
    version = now;
  }
  auto& info = infos[&op.schema()];
  if (!info) {
    info = all.emplace_back(std::make_unique<const OpInfo>(make_info(op))).get();
  }
  return info;
}

}  // namespace

int64_t scalar_tensor_key(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.scalar_type()) * 2 + (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 1 : 0);
}

bool same_scalar(const c10::IValue& a, const c10::IValue& b, bool float_values) {
  if (a.isNone() || b.isNone()) {
    return a.isNone() && b.isNone();
  }
  if (a.isInt() && b.isInt()) {
    return a.toInt() == b.toInt();
  }
  if (a.isBool() && b.isBool()) {
    return a.toBool() == b.toBool();
  }
  if (a.isDouble() && b.isDouble()) {
    return float_values ? hash_double(a.toDouble()) == hash_double(b.toDouble())
                        : number_kind(a.toDouble()) == number_kind(b.toDouble());
  }
  if (a.isGenerator() && b.isGenerator()) {
    return true;  // plans do not depend on random states
  }
  if (a.isIntList() && b.isIntList()) {
    const auto first = a.toListRef(), second = b.toListRef();  // toIntList() would count a reference
    return std::equal(first.begin(), first.end(), second.begin(), second.end(),
                      [](const auto& x, const auto& y) { return x.toInt() == y.toInt(); });
  }
  if (a.isList() && b.isList()) {
    const auto first = a.toListRef(), second = b.toListRef();
    return std::equal(first.begin(), first.end(), second.begin(), second.end(),
                      [=](const auto& x, const auto& y) { return same_scalar(x, y, float_values); });
  }
  return a.type()->kind() == b.type()->kind() && a == b;
}

bool is_scalar_argument(const CallSignature& call, size_t arg) {
  const auto& value = call.args[arg];
  return !value.isTensor() && !(call.info->kinds[arg] == OpInfo::ArgKind::TensorList && value.isList());
}

const OpInfo& OpInfo::of(const c10::OperatorHandle& op) {
  const auto* schema = &op.schema();
  auto& slot = recent_infos.slots[(reinterpret_cast<uintptr_t>(schema) >> 5) % recent_infos.slots.size()];
  if (slot.schema != schema || recent_infos.version != op_rules_version()) [[unlikely]] {
    if (const uint64_t now = op_rules_version(); recent_infos.version != now) {
      recent_infos = {.slots = {}, .version = now};
    }
    slot = {schema, look_up_info(op, recent_infos.version)};
  }
  return *slot.info;
}

CallSignature::CallSignature(const OpInfo& op_info, at::ArrayRef<c10::IValue> call_args)
    : info(&op_info), args(call_args), default_dtype(c10::get_default_dtype_as_scalartype()) {
  hash = mix(static_cast<uint64_t>(default_dtype), reinterpret_cast<uint64_t>(info));
  if (info->takes_lists) {
    size_t list_size = 0;
    for (size_t arg = 0; arg < args.size(); ++arg) {
      const bool is_list = info->kinds[arg] == OpInfo::ArgKind::TensorList && args[arg].isList();
      list_size += is_list ? args[arg].toListRef().size() : 0;
    }
    list_tensors_.reserve(list_size);  // operands point into it
  }
  for (size_t arg = 0; arg < args.size(); ++arg) {
    const auto& value = args[arg];
    if (value.isTensor()) {
      if (value.toTensor().defined()) {
        add(arg, 0, value.toTensor());
      }
    } else if (info->kinds[arg] == OpInfo::ArgKind::TensorList && value.isList()) {
      add_list(arg, value);
    } else {
      add_scalar(value);
    }
  }
}

void CallSignature::add_list(size_t arg, const c10::IValue& list) {
  size_t index = 0;
  const auto elements = list.toListRef();
  hash = mix(hash, elements.size());  // of a Tensor?[], whose undefined entries are not operands
  for (const auto& element : elements) {
    if (element.isTensor() && element.toTensor().defined()) {
      list_tensors_.push_back(element.toTensor());
      add(arg, index, list_tensors_.back());
    }
    ++index;
  }
}

void CallSignature::add(size_t arg, size_t index, const at::Tensor& tensor) {
  const auto* dtensor = dtensor_meta(tensor);
  auto& operand = operands.emplace_back();
  operand.arg = arg;
  operand.index = index;
  operand.tensor = &tensor;
  operand.dtensor = dtensor;
  const uint64_t place = arg << 32 | index;
  if (dtensor) {
    hash = mix(hash, dtensor->spec->hash_with_groups() + place);
    has_materialized_view = has_materialized_view || dtensor->materialized_view;
  } else {
    mixed = mixed || tensor.dim() > 0 || is_written(arg);
    hash = mix(hash, static_cast<uint64_t>(scalar_tensor_key(tensor)) + place);
  }
}

void CallSignature::add_scalar(const c10::IValue& value) {
  cacheable = cacheable && is_key_scalar(value);
  hash = mix(hash, hash_scalar(value, info->reads_float_scalars));
}

}  // namespace tessera
