#include "dtensor/dispatch/functional_variant.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "dtensor/dispatch/call_signature.h"
#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/propagation/propagate.h"

namespace tessera {

namespace {

using torch::jit::Stack;

const std::vector<std::string>& find_overloads(const std::string& name) {
  static const auto* overloads = [] {
    auto* all = new std::map<std::string, std::vector<std::string>>();
    for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
      (*all)[op.name].push_back(op.overload_name);
    }
    return all;
  }();
  static const std::vector<std::string> none;
  const auto found = overloads->find(name);
  return found == overloads->end() ? none : found->second;
}

/// Returns arguments that the functional variant also has: all except those that an out= op only writes.
std::vector<size_t> input_positions(const c10::FunctionSchema& schema, bool in_place) {
  std::vector<size_t> inputs;
  for (size_t arg = 0; arg < schema.arguments().size(); ++arg) {
    if (in_place || !is_written(schema.arguments()[arg])) {
      inputs.push_back(arg);
    }
  }
  return inputs;
}

bool takes_the_same(const c10::FunctionSchema& functional, const c10::FunctionSchema& schema,
                    const std::vector<size_t>& inputs) {
  if (functional.arguments().size() != inputs.size() || functional.is_mutable()) {
    return false;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& a = functional.arguments()[i];
    const auto& b = schema.arguments()[inputs[i]];
    if (a.name() != b.name() || *a.real_type() != *b.real_type()) {
      return false;
    }
  }
  return true;
}

/// Returns whether only argument 0 is written, as the name says.
bool is_in_place(const c10::FunctionSchema& schema) {
  return !schema.arguments().empty() && is_written(schema.arguments()[0]) && schema.name().back() == '_';
}

bool is_out_variant(const c10::FunctionSchema& schema) {
  bool any = false;
  for (const auto& argument : schema.arguments()) {
    if (is_written(argument) && !argument.kwarg_only()) {
      return false;
    }
    any = any || is_written(argument);
  }
  return any;
}

void append_tensors(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    tensors.insert(tensors.end(), list.begin(), list.end());
  }
}

void write_result(const c10::OperatorHandle& op, const at::Tensor& target, const at::Tensor& result) {
  const auto name = toString(op.operator_name());
  TESSERA_CHECK(ValueError, dtensor_meta(target) != nullptr && dtensor_meta(result) != nullptr,
                "{}: DTensors and plain tensors are mixed: {}", name,
                dtensor_meta(target) ? "the written tensor is a DTensor and the result plain. Make the inputs DTensors "
                                       "with distribute_tensor, or write to a plain tensor"
                                     : "the written tensor is plain and the result a DTensor. Write to a DTensor, take "
                                       "the result without out=, or copy full_tensor() of it, on every rank");
  TESSERA_CHECK(ValueError, c10::canCast(result.scalar_type(), target.scalar_type()),
                "{}: the result is {}, which a tensor of {} cannot take on", name, toString(result.scalar_type()),
                toString(target.scalar_type()));
  if (target.sizes() != result.sizes()) {
    target.resize_(result.sizes());
  }
  target.copy_(result);
}

/// Sets the dtype of ops that compute in the dtype of the written tensor if the call names none. (So do var and std,
/// which take no dtype; their result is rounded to the input's dtype first.)
void name_dtype(const c10::FunctionSchema& functional, Stack& args, const c10::IValue& out) {
  static const std::unordered_set<std::string> names{"aten::sum",  "aten::nansum", "aten::prod",
                                                     "aten::mean", "aten::cumsum", "aten::cumprod"};
  const auto dtype = functional.argumentIndexWithName("dtype");
  if (!dtype || !names.contains(functional.name()) || !args[static_cast<size_t>(*dtype)].isNone()) {
    return;
  }
  const auto self = args[0].toTensor().scalar_type();
  if (functional.name() != "aten::mean" || !c10::isIntegralType(self, /*includeBool=*/true)) {
    args[static_cast<size_t>(*dtype)] = c10::IValue(out.toTensor().scalar_type());
  }
}

}  // namespace

std::optional<c10::OperatorHandle> functional_variant(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const bool in_place = is_in_place(schema);
  if (!in_place && !is_out_variant(schema)) {
    return std::nullopt;
  }
  const auto inputs = input_positions(schema, in_place);
  const auto name = in_place ? schema.name().substr(0, schema.name().size() - 1) : schema.name();
  for (const auto& overload : find_overloads(name)) {
    const auto candidate = c10::Dispatcher::singleton().findSchema({name, overload});
    if (candidate && takes_the_same(candidate->schema(), schema, inputs)) {
      return candidate;
    }
  }
  return std::nullopt;
}

void run_functional_variant(const c10::OperatorHandle& op, const c10::OperatorHandle& functional, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  // Autocast saw the original op, and casts no operands of ops that write.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset.remove(kReplicatingKey));
  const auto& schema = op.schema();
  const size_t num_args = schema.arguments().size();
  const Stack args(stack->end() - static_cast<std::ptrdiff_t>(num_args), stack->end());
  Stack inner;
  for (const size_t arg : input_positions(schema, is_in_place(schema))) {
    inner.push_back(args[arg]);
  }
  if (is_out_variant(schema)) {
    const auto out = std::ranges::find_if(schema.arguments(), is_written);
    name_dtype(functional.schema(), inner, args[static_cast<size_t>(out - schema.arguments().begin())]);
  }
  functional.callBoxed(&inner);

  std::vector<at::Tensor> results, targets;
  for (const auto& value : inner) {
    append_tensors(value, results);
  }
  torch::jit::drop(*stack, num_args);
  for (size_t arg = 0; arg < num_args; ++arg) {
    if (is_written(schema.arguments()[arg])) {
      append_tensors(args[arg], targets);
      if (stack->size() < schema.returns().size()) {
        stack->push_back(args[arg]);
      }
    }
  }
  TESSERA_ASSERT(targets.size() == results.size(), "{} writes {} tensors, {} computes {}", schema.name(),
                 targets.size(), functional.schema().name(), results.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    write_result(op, targets[i], results[i]);
    if (OpInfo::of(op).counts_versions) {
      count_write(targets[i]);
    }
  }
}

}  // namespace tessera
