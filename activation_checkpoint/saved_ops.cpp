#include "activation_checkpoint/saved_ops.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace tessera {

namespace {

// A key below autograd and above all backends. libtorch reserves it for fake tensors but has no kernels for it.
constexpr auto kKey = c10::DispatchKey::Fake;

thread_local SavedOps* current_ops = nullptr;
thread_local SavedOpsScope::Mode current_mode = SavedOpsScope::Mode::Save;

/// Returns whether a call drops out elements; attention kernels can, but rarely do.
bool drops(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto at = op.schema().argumentIndexWithName("dropout_p");
  return at && torch::jit::peek(stack, static_cast<size_t>(*at), op.schema().arguments().size()).toDouble() > 0;
}

void on_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard inside_is_not_seen(kKey);
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (!current_ops || !current_ops->covers(op) || drops(op, *stack)) {
    op.redispatchBoxed(keys, stack);
  } else if (current_mode == SavedOpsScope::Mode::Save) {
    current_ops->run(op, keys, stack);
  } else {
    current_ops->replay(op, stack);
  }
}

void check_op(const std::string& name, const c10::OperatorHandle& op) {
  TESSERA_CHECK(ValueError, !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd),
                "OpList: {} consists of other ops, which autograd sees in its place; name those (of aten::linear and "
                "aten::matmul: aten::addmm, aten::mm, aten::bmm)",
                name);
  const bool may_drop = op.schema().argumentIndexWithName("dropout_p").has_value();
  TESSERA_CHECK(ValueError, may_drop || !op.hasTag(at::Tag::nondeterministic_seeded),
                "OpList: {} draws random numbers, which the second forward has to draw again, so that later draws stay "
                "the same; leave it out",
                name);
}

bool returns_new_tensors(const c10::FunctionSchema& schema) {
  const auto is_new = [](const c10::Argument& argument) { return argument.alias_info() == nullptr; };
  return std::all_of(schema.returns().begin(), schema.returns().end(), is_new) &&
         std::all_of(schema.arguments().begin(), schema.arguments().end(), is_new);
}

/// Calls `visit` with each defined tensor of `value`, and replaces it by the result.
template <class Visit>
void map_tensors(c10::IValue& value, Visit visit) {
  if (value.isTensor() && value.toTensor().defined()) {
    value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = visit(tensor);
    }
    value = c10::IValue(std::move(tensors));
  }
}

}  // namespace

OpList::OpList(const std::vector<std::string>& names) {
  auto ops = std::make_shared<std::unordered_set<c10::OperatorName>>();
  const std::unordered_set<std::string> wanted(names.begin(), names.end());
  std::unordered_set<std::string> known, usable;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = wanted.contains(name.name) ? dispatcher.findSchema(name) : std::nullopt;
    if (op) {
      known.insert(name.name);
      if (returns_new_tensors(op->schema())) {
        check_op(name.name, *op);
        usable.insert(name.name);
        ops->insert(name);
      }
    }
  }
  for (const auto& name : names) {
    TESSERA_CHECK(KeyError, known.contains(name),
                  "OpList: libtorch has no op '{}'; names are like aten::mm, without overload", name);
    TESSERA_CHECK(ValueError, usable.contains(name),
                  "OpList: {} writes or returns its arguments, so its result cannot be kept; leave it out", name);
  }
  if (!names.empty()) {
    ops_ = std::move(ops);
  }
}

void SavedOps::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  op.redispatchBoxed(keys, stack);
  const size_t returns = op.schema().returns().size();
  Result result{op.operator_name(), {stack->end() - static_cast<int64_t>(returns), stack->end()}, {}};
  for (auto& value : result.values) {
    // Autograd adds its history to the tensor that it gets, so the saved one shares memory without history.
    map_tensors(value, [&](const at::Tensor& tensor) {
      result.versions.push_back(static_cast<int64_t>(tensor._version()));
      return tensor.tensor_data();
    });
  }
  results_.push_back(std::move(result));
}

void SavedOps::replay(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TESSERA_CHECK(StateError, next_ < results_.size() && results_[next_].op == op.operator_name(),
                "checkpoint: the forward that backward computes again differs from the first: it calls {} where it "
                "called {}",
                toString(op.operator_name()), next_ < results_.size() ? toString(results_[next_].op) : "no such op");
  const auto& result = results_[next_++];
  torch::jit::drop(*stack, op.schema().arguments().size());
  size_t tensor_index = 0;
  for (auto value : result.values) {
    map_tensors(value, [&](const at::Tensor& tensor) {
      TESSERA_CHECK(StateError, static_cast<int64_t>(tensor._version()) == result.versions[tensor_index++],
                    "checkpoint: the result of {} is among those to be saved, but was changed in place later; change a "
                    "copy, or leave the op out of ops_to_save",
                    toString(op.operator_name()));
      return tensor.tensor_data();
    });
    stack->push_back(std::move(value));
  }
}

SavedOpsScope::SavedOpsScope(SavedOps* ops, Mode mode)
    : previous_ops_(std::exchange(current_ops, ops)),
      previous_mode_(std::exchange(current_mode, mode)),
      was_included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  c10::impl::tls_set_dispatch_key_included(kKey, ops != nullptr);
}

SavedOpsScope::~SavedOpsScope() {
  c10::impl::tls_set_dispatch_key_included(kKey, was_included_);
  current_mode = previous_mode_;
  current_ops = previous_ops_;
}

}  // namespace tessera

TORCH_LIBRARY_IMPL(_, Fake, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::on_op>());
}
