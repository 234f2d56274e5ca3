#include "dtensor/dispatch/dispatch_checks.h"

#include <ATen/core/enum_tag.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>

#include "base/error.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/spec/redistribute_plan.h"

namespace tessera {

std::string describe_arguments(const CallSignature& call) {
  std::string text;
  for (const auto& operand : call.operands) {
    text += text.empty() ? "" : ", ";
    text += operand.dtensor ? operand.dtensor->spec->to_string()
                            : "plain " + to_string(TensorMeta::of(*operand.tensor)) + " tensor";
  }
  return text;
}

namespace {

constexpr const char* kLoadBefore =
    "torch::load cannot write to DTensors: load before the model is sharded, or load a plain one and call "
    "dcp::set_model_state_dict(net, dcp::get_model_state_dict(plain), {.full_state_dict = true})";

constexpr const char* kBackwardBefore = "If this is an optimizer step, run backward() first";

/// Follows kBackwardBefore.
constexpr const char* kPlainState =
    "; an Adagrad is to be made after the model was sharded; if the optimizer's state is plain otherwise, as "
    "torch::load "
    "makes it, load it into an optimizer of a plain model and call "
    "dcp::set_optimizer_state_dict(net, optimizer, dcp::get_optimizer_state_dict(plain, plain_optimizer), "
    "{.full_state_dict = true}), or dcp::load a checkpoint";

/// Short version for unlikely cases.
constexpr const char* kOptimizerState =
    ". If this is an optimizer step, run backward() first; if the optimizer's state is plain, set it by "
    "dcp::set_optimizer_state_dict(net, optimizer, dcp::get_optimizer_state_dict(plain, plain_optimizer), "
    "{.full_state_dict = true})";

constexpr const char* kClipGradients = "To clip gradients, call tessera::clip_grad_norm_ (dtensor/clip_grad_norm.h). ";

/// Returns whether the op gives a parameter another tensor's memory, as torch::load does.
bool takes_other_memory(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name == "aten::set_" || name == "aten::set";
}

bool is_loss_of_classes(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name.starts_with("aten::nll_loss") || name.starts_with("aten::cross_entropy_loss");
}

bool writes_dtensor(const CallSignature& call) {
  return std::ranges::any_of(
      call.operands, [&](const CallOperand& operand) { return operand.dtensor && call.is_written(operand.arg); });
}

bool writes_plain(const CallSignature& call) {
  return std::ranges::any_of(
      call.operands, [&](const CallOperand& operand) { return !operand.dtensor && call.is_written(operand.arg); });
}

/// Returns whether the call is like x.add_(y) with a plain x, such as an optimizer's state. Excludes layers that write
/// running statistics.
bool updates_plain(const CallSignature& call) {
  const auto& first = call.operands[0];
  return first.arg == 0 && !first.dtensor && call.is_written(0);
}

/// Returns the remedy for a sharded parameter, or its gradient. Writes to a manually gathered one would be lost.
std::string remedy_for_sharded(const c10::OperatorHandle& op, const CallSignature& call,
                               const ParameterOrigin& origin) {
  if (takes_other_memory(op)) {
    return kLoadBefore;
  }
  if (writes_dtensor(call)) {
    return fmt::format(
        "To write whole values to a parameter p, make them a DTensor alike: distribute_tensor(value, device_mesh(p), "
        "placements(p)). {}{}",
        kBackwardBefore, writes_plain(call) ? kPlainState : "");
  }
  if (op.operator_name().name == "aten::copy_") {
    return "To copy it into a plain tensor, take full_tensor() of it, on every rank";
  }
  if (updates_plain(call)) {
    return fmt::format(
        "To update a plain tensor with it, take full_tensor() of it, on every rank; within a forward, call {} itself, "
        "not its parts. {}{}",
        origin.module, kBackwardBefore, kPlainState);
  }
  return fmt::format(
      "It is gathered by the hooks of {} only while that module's forward or backward runs. Call the module itself "
      "(not its parts or forward of a stock base class), declare its type with TESSERA_MODULE or wrap it with "
      "hooked(), or gather it by hand with fsdp(module).unshard(). A part that is called by itself, as a head by a "
      "loss in chunks, is to be a unit of its own: fully_shard(part) before fully_shard() of the module around it. {}",
      origin.module, kBackwardBefore);
}

/// Returns whether the call joins norms, as torch::nn::utils::clip_grad_norm_ does with those of gradients.
bool joins_norms(const c10::OperatorHandle& op, const CallSignature& call) {
  const auto& name = op.operator_name().name;
  return (name == "aten::stack" || name == "aten::cat") &&
         std::ranges::all_of(call.operands, [](const CallOperand& operand) { return operand.tensor->numel() == 1; });
}

/// Returns whether the call scales by a DTensor without dims, as clip_grad_norm_ does with a plain gradient.
bool scales_by_number(const c10::OperatorHandle& op, const CallSignature& call) {
  const auto& name = op.operator_name().name;
  const auto& factor = call.operands.back();
  return (name == "aten::mul_" || name == "aten::_foreach_mul_") && factor.dtensor && factor.tensor->dim() == 0;
}

/// Returns whether the call may update an optimizer's state, from tensors like a parameter.
bool may_update_state(const CallSignature& call) {
  return updates_plain(call) && std::ranges::any_of(call.operands, [](const CallOperand& operand) {
           return operand.dtensor && operand.tensor->dim() > 0;
         });
}

std::string remedy_for_written_plain(const c10::OperatorHandle& op, const CallSignature& call) {
  const bool copies = op.operator_name().name == "aten::copy_";
  return fmt::format(
      "{}A plain tensor t is written, which is taken for no copy, also in an ImplicitReplication scope: {}write "
      "full_tensor() of the DTensors, taken on every rank, to it, or make it a DTensor with "
      "distribute_tensor(t, mesh, {{Replicate()}}){}",
      scales_by_number(op, call) ? kClipGradients : "",
      updates_plain(call) && !copies ? "write t = t + x, a new tensor, instead of t += x, " : "",
      may_update_state(call) && !copies ? kOptimizerState : "");
}

std::string remedy_for_mixed(const c10::OperatorHandle& op, const CallSignature& call) {
  if (takes_other_memory(op)) {
    return kLoadBefore;
  }
  if (writes_plain(call)) {
    return remedy_for_written_plain(op, call);
  }
  return fmt::format(
      "{}"
      "Make the plain ones DTensors with distribute_tensor(t, mesh, {{Replicate()}}) or from_local, take to_local() / "
      "full_tensor() of the DTensors (with Partial grad_placements where each rank goes on with data of its own), or "
      "declare plain tensors equal on all ranks (not a batch that differs between ranks) with an ImplicitReplication "
      "scope{}",
      joins_norms(op, call) ? kClipGradients : "",
      is_loss_of_classes(op) ? ", or the targets of a loss with a LossParallel scope" : "");
}

constexpr const char* kOnDTensors = "of DTensors: ";

/// Describes the call, for errors that do not.
std::string describe_call(const c10::OperatorHandle& op, const CallSignature& call) {
  return fmt::format(
      "{} {}{}. The sizes, dtypes and numbers must fit as those of the whole tensors; where they do and "
      "plain tensors are taken, run the op on full_tensor() of the DTensors, taken on every rank, or "
      "let it run so in a ReplicateAndRun scope",
      toString(op.operator_name()), kOnDTensors, describe_arguments(call));
}

/// Returns whether redistribute() can move a tensor between any two of the operands' meshes.
bool share_root(const CallSignature& call) {
  std::optional<DeviceMesh> root;
  return std::ranges::all_of(call.operands, [&](const CallOperand& operand) {
    if (operand.dtensor && !root) {
      root = operand.dtensor->spec->mesh().root();
    }
    return !operand.dtensor || operand.dtensor->spec->mesh().root() == *root;
  });
}

}  // namespace

void rethrow_with_call(const c10::OperatorHandle& op, const CallSignature& call) {
  try {
    throw;
  } catch (c10::Error& error) {
    const auto has_call = [](const std::string& line) { return line.find(kOnDTensors) != line.npos; };
    if (std::ranges::none_of(error.context(), has_call)) {
      error.add_context(describe_call(op, call));
    }
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw ValueError(fmt::format("{} ({})", error.what(), describe_call(op, call)));
  }
}

void throw_mixed(const c10::OperatorHandle& op, const CallSignature& call) {
  const std::string name = toString(op.operator_name());
  for (const auto& operand : call.operands) {
    if (operand.dtensor && operand.dtensor->origin) {
      const auto& origin = *operand.dtensor->origin;
      TESSERA_CHECK(StateError, false, "{}: parameter '{}' is sharded, but it meets tensors that are not: {}. {}", name,
                    origin.name, describe_arguments(call), remedy_for_sharded(op, call, origin));
    }
  }
  TESSERA_CHECK(ValueError, false, "{}: DTensors and plain tensors are mixed: {}. {}", name, describe_arguments(call),
                remedy_for_mixed(op, call));
}

void check_runs_whole(const c10::OperatorHandle& op, const CallSignature& call) {
  TESSERA_CHECK(
      NotImplementedError, ReplicateAndRun::active(),
      "{} has no sharding rule, so it cannot run on {}. Take to_local() or full_tensor() of the DTensors, run "
      "it on those, and make the result a DTensor with from_local; or register_sharding() for it. In a ReplicateAndRun "
      "scope it runs on whole tensors",
      toString(op.operator_name()), describe_arguments(call));
  TESSERA_CHECK(NotImplementedError, !op.hasTag(at::Tag::nondeterministic_seeded),
                "{} draws random numbers and has no sharding rule: in a ReplicateAndRun scope each rank would draw its "
                "own. Draw on one rank and distribute_tensor() the result",
                toString(op.operator_name()));
}

void check_materialized_views(const c10::OperatorHandle& op, const CallSignature& call) {
  int64_t written = 0, written_views = 0;
  for (const auto& operand : call.operands) {
    const bool is_written = call.is_written(operand.arg);
    written += is_written ? 1 : 0;
    if (!operand.dtensor || !operand.dtensor->materialized_view) {
      continue;
    }
    if (operand.dtensor->materialized_view.is_stale()) {
      check_not_stale(*operand.dtensor, toString(op.operator_name()).c_str());
    }
    written_views += is_written ? 1 : 0;
    const auto reason = is_written ? operand.dtensor->materialized_view.why_not_written(*operand.tensor) : "";
    TESSERA_CHECK(
        NotImplementedError, reason.empty(),
        "{} writes to a view whose data had to be moved, and the viewed tensor would not see it, as the view {}: {}. "
        "To write to the tensor, use slices of its dims, an op on all of it (masked_fill_ with a DTensor mask, "
        "index_put_ with DTensor indices), take a new tensor (slice_scatter, select_scatter, diagonal_scatter) or "
        "write this rank's part, to_local(); to write to the view alone, clone() it, or redistribute() the tensor "
        "before it",
        toString(op.operator_name()), reason, describe_arguments(call));
  }
  // Otherwise the result would depend on the order of writes.
  TESSERA_CHECK(NotImplementedError, written_views == 0 || written == 1,
                "{} writes to several tensors, of which one is a view whose data had to be moved: {}. Call it for one "
                "at a time",
                toString(op.operator_name()), describe_arguments(call));
}

bool may_replicate_implicitly(const CallSignature& call) {
  return std::none_of(call.operands.begin(), call.operands.end(), [&](const CallOperand& operand) {
    return operand.dtensor ? operand.dtensor->origin != nullptr : call.is_written(operand.arg);
  });
}

void check_written_once(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan) {
  const auto is_written = [&](size_t i) { return call.is_written(call.operands[i].arg); };
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (!plan.redistribute[i] || !is_written(i)) {
      continue;
    }
    for (size_t other = 0; other < call.operands.size(); ++other) {
      TESSERA_CHECK(
          ValueError, other == i || call.operands[other].dtensor != call.operands[i].dtensor || !is_written(other),
          "{} writes to one tensor twice, as operands {} and {}, and would have to redistribute it to {}: {}. "
          "redistribute() it first, or write to it in two calls",
          toString(op.operator_name()), std::min(i, other), std::max(i, other),
          to_string(plan.operands[i]->placements()), describe_arguments(call));
    }
  }
}

void check_moves_allowed(const c10::OperatorHandle& op, const CallSignature& call, const OpPlan& plan) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    const auto* dtensor = call.operands[i].dtensor;
    if (dtensor && dtensor->materialized_view && call.is_written(call.operands[i].arg)) {
      const auto& spec = *dtensor->spec;
      const Placements replicated(spec.placements().size(), Replicate());
      TESSERA_CHECK(StateError,
                    !ExplicitRedistribution::forbids(plan_redistribute(spec.placements(), replicated), spec.mesh()),
                    "{} would gather what it writes to a view of a tensor that is cut otherwise, which "
                    "ExplicitRedistribution forbids: {}. redistribute() the tensor before the view",
                    toString(op.operator_name()), describe_arguments(call));
    }
    if (!plan.redistribute[i]) {
      continue;
    }
    const auto& from = *call.operands[i].dtensor->spec;
    const auto& to = plan.operands[i]->placements();
    const auto steps = plan_redistribute(from.placements(), to);
    const bool goes_back = call.is_written(call.operands[i].arg);
    const bool forbidden =
        ExplicitRedistribution::forbids(steps, from.mesh()) ||
        (goes_back && ExplicitRedistribution::forbids(plan_redistribute(to, from.placements()), from.mesh()));
    TESSERA_CHECK(StateError, !forbidden,
                  "{} would redistribute operand {} to {} ({}), which ExplicitRedistribution forbids: {}. Call "
                  "redistribute() on it first",
                  toString(op.operator_name()), i, to_string(to), to_string(steps), describe_arguments(call));
  }
}

// If only some operands are fully_shard parameters, the likely cause is that these should have been gathered.
void throw_different_meshes(const c10::OperatorHandle& op, const CallSignature& call) {
  const auto is_managed = [](const CallOperand& operand) { return operand.dtensor && operand.dtensor->origin; };
  const auto managed = std::count_if(call.operands.begin(), call.operands.end(), is_managed);
  if (managed > 0 && managed < std::ssize(call.operands)) {
    throw_mixed(op, call);
  }
  TESSERA_CHECK(
      ValueError, false, "{}: operands lie on different meshes: {}. {}{}, or run the op on those of each mesh",
      toString(op.operator_name()), describe_arguments(call), joins_norms(op, call) ? kClipGradients : "",
      share_root(call) ? "redistribute(tensor, mesh, placements) carries one over"
                       : "They are no parts of one mesh, so take full_tensor() of one, on every rank of both, "
                         "and distribute_tensor() it over the other");
}

}  // namespace tessera
