#include "activation_checkpoint/shared_generator_use.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.h"
#include "comm/process_group.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera {

namespace {

thread_local std::string random_op;  // first op that drew from the default generator, or empty

/// Returns whether an argument tells that the call does not draw, as for some ops that may.
bool is_without_draws(const c10::FunctionSchema& schema, c10::ArrayRef<const c10::IValue> inputs) {
  const auto input = [&](const char* name) {
    const auto place = schema.argumentIndexWithName(name);
    return place && static_cast<size_t>(*place) < inputs.size() ? inputs[*place] : c10::IValue();
  };
  const auto is_zero = [](const c10::IValue& value) { return value.isDouble() && value.toDouble() == 0; };
  const auto is_false = [](const c10::IValue& value) { return value.isBool() && !value.toBool(); };
  return is_zero(input("dropout_p")) || is_false(input("train")) || is_false(input("training"));
}

/// Returns whether an op consists of others, which are seen separately: dropout, recurrent layers.
bool is_made_of_others(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

/// Returns false for ops on DTensors, including their local ops, which draw from the rank's own generator.
bool draws_from_default_generator(const at::RecordFunction& call) {
  const auto name = call.operator_name();
  const auto op = name && !dispatching_op() ? c10::Dispatcher::singleton().findOp(*name) : std::nullopt;
  if (!op || !op->hasTag(at::Tag::nondeterministic_seeded) || is_made_of_others(*op)) {
    return false;
  }
  const auto inputs = call.inputs();
  return !is_without_draws(op->schema(), inputs) &&
         std::none_of(inputs.begin(), inputs.end(), [](const c10::IValue& input) {
           return input.isGenerator() ||
                  (input.isTensor() && input.toTensor().defined() && dtensor_meta(input.toTensor()));
         });
}

std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
  if (random_op.empty() && draws_from_default_generator(call)) {
    random_op = call.name();
  }
  return nullptr;
}

}  // namespace

bool ranks_share_generators() {
  return is_initialized() && get_world_size() > 1 &&
         default_group()->getDefaultBackend()->getBackendName() == "threads";
}

SharedGeneratorUse::SharedGeneratorUse(bool enabled) {
  if (enabled && ranks_share_generators()) {
    outer_op_ = std::exchange(random_op, {});
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&on_call).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
}

SharedGeneratorUse::~SharedGeneratorUse() {
  if (callback_) {
    at::removeCallback(*callback_);
    random_op = std::move(outer_op_);
  }
}

void SharedGeneratorUse::check(const std::string& place) const {
  TESSERA_CHECK(NotImplementedError, !callback_ || random_op.empty(),
                "{}: {} on a plain tensor draws from libtorch's default generator, which ranks that are threads share, "
                "so backward could not draw the same numbers again. Run ranks as processes, make the input a DTensor "
                "(which draws from the rank's own generator), make a generator inside the region or pass it one as an "
                "argument, or set preserve_rng_state to false if the numbers may differ",
                place, random_op);
}

}  // namespace tessera
