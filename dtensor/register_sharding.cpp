#include "dtensor/register_sharding.h"

#include <torch/library.h>

#include <deque>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "dtensor/dispatch/dispatch.h"

namespace tessera {

namespace {

/// Returns `placement` with a nonnegative dim.
Placement checked_placement(const Placement& placement, const TensorMeta& meta, const std::string& op, const char* what,
                            size_t index) {
  if (!placement.is_shard()) {
    return placement;
  }
  const auto ndim = static_cast<int64_t>(meta.sizes.size());
  TESSERA_CHECK(ValueError, placement.dim() >= -ndim && placement.dim() < ndim,
                "{}: a strategy of its register_sharding has {} for {} {}, which has {} dim(s)", op,
                placement.to_string(), what, index, ndim);
  return placement.dim() < 0 ? Shard(placement.dim() + ndim, placement.order()) : placement;
}

/// Throws ValueError for strategies that do not fit the call.
Strategies checked_strategies(Strategies strategies, const OpCall& call, const std::string& op) {
  for (auto& [operands, outputs] : strategies) {
    TESSERA_CHECK(
        ValueError, operands.size() == call.operands.size() && outputs.size() == call.outputs.size(),
        "{}: a strategy of its register_sharding has placements for {} operands and {} outputs; this call has "
        "{} and {} (tensors in lists count one by one)",
        op, operands.size(), outputs.size(), call.operands.size(), call.outputs.size());
    for (size_t i = 0; i < operands.size(); ++i) {
      operands[i] = checked_placement(operands[i], call.operands[i].meta, op, "operand", i);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i] = checked_placement(outputs[i], call.outputs[i], op, "output", i);
    }
  }
  return strategies;
}

c10::OperatorName parse_op(const std::string& op) {
  const size_t dot = op.find('.');
  return dot == std::string::npos ? c10::OperatorName(op, "")
                                  : c10::OperatorName(op.substr(0, dot), op.substr(dot + 1));
}

/// Replaces a kernel for all backends, which would precede the fallback and get the DTensor itself. The replacement is
/// boxed, because kernels may take tensors by value, and unboxed kernels of an op must have one C++ type. Called under
/// a lock.
void dispatch_in_place_of_composite(const c10::OperatorHandle& op) {
  static std::deque<torch::Library> libraries;  // own the registrations
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
      !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    const auto& name = op.operator_name();
    const size_t colons = name.name.find("::");
    auto& library = libraries.emplace_back(torch::Library::IMPL, name.name.substr(0, colons),
                                           c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    library.impl(toString(name).substr(colons + 2).c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
  }
}

}  // namespace

void register_sharding(const std::string& op, std::function<Strategies(const OpCall& call)> strategies) {
  TESSERA_CHECK(ValueError, strategies != nullptr, "register_sharding(\"{}\"): strategies is an empty function", op);
  const auto handle = c10::Dispatcher::singleton().findSchema(parse_op(op));
  TESSERA_CHECK(ValueError, handle,
                "register_sharding(\"{}\"): there is no such op. Its name is as in TORCH_LIBRARY, \"namespace::op\", "
                "with \".overload\" where it has one",
                op);
  // Ranks that are threads may register concurrently. libtorch locks the registration of kernels, but not queries.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  TESSERA_CHECK(
      ValueError, !handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd),
      "register_sharding(\"{}\"): its kernel is a CompositeImplicitAutograd one, so that the ops which it calls "
      "run under their own rules, and it never under this one; give it kernels for CPU, CUDA and Meta, or "
      "register those ops",
      op);
  check_replaceable(op);
  dispatch_in_place_of_composite(*handle);  // if it throws, no rule is registered
  replace_op_rule(op, {.strategies = [op, own = std::move(strategies)](const OpCall& call) {
                    return checked_strategies(own(call), call, op);
                  }});
}

}  // namespace tessera
