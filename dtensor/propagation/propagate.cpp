#include "dtensor/propagation/propagate.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "dtensor/propagation/output_metas.h"

namespace tessera {

namespace {

/// Returns whether this rank must dry-run the kernel: it has no element of an operand of which others have some, so its
/// kernel might accept arguments that theirs reject. The op must be safe to call on zeros: it draws nothing, is no
/// view, and has no effects that could be a program's own. For lists, only if all tensors are empty here, because
/// otherwise they could be all parameters of a model.
bool must_dry_run(const OpCall& call, const OpRule& rule, const OpPlan& plan) {
  const auto lacks_elements = [](const SpecPtr& spec) {
    return spec && is_empty(spec->local_sizes()) && !is_empty(spec->sizes());
  };
  if (std::ranges::none_of(plan.operands, lacks_elements)) {
    return false;
  }
  if (rule.needs_dry_run) {
    return !plan.nothing_to_compute;  // otherwise it dry-runs at each call
  }
  const auto& schema = call.op.schema();
  const auto is_view = [](const c10::Argument& result) { return result.alias_info() && !is_written(result); };
  return (!rule.local_call || rule.op_takes_shards) && call.op.operator_name().getNamespace() == "aten" &&
         !call.op.hasTag(at::Tag::nondeterministic_seeded) && std::ranges::none_of(schema.returns(), is_view) &&
         (plan.nothing_to_compute ||
          std::ranges::none_of(call.args, [](const c10::IValue& value) { return value.isTensorList(); }));
}

/// Returns whether strides changed: moved operands are row-major, so kernels may lay out results differently.
bool operand_strides_changed(const OpCall& call, const OpPlan& plan) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (plan.redistribute[i] && plan.operands[i]->strides() != at::IntArrayRef(call.operands[i].meta.strides)) {
      return true;
    }
  }
  return false;
}

/// Returns whether data moves. Along an axis of one rank, all placements have the same data.
bool data_moves(const DTensorSpec& from, const Placements& to) {
  for (size_t axis = 0; axis < to.size(); ++axis) {
    if (from.placements()[axis] != to[axis] && from.mesh().shape()[axis] > 1) {
      return true;
    }
  }
  return false;
}

bool is_whole_and_dense(const DTensorSpec& spec, const Placements& placements) {
  const auto is_copy = [](const Placement& placement) { return placement.is_replicate(); };
  return std::all_of(placements.begin(), placements.end(), is_copy) &&
         meta_tensor(spec.meta()).is_non_overlapping_and_dense();
}

bool shards_a_dim_twice(const Placements& placements) {
  for (size_t a = 0; a < placements.size(); ++a) {
    for (size_t b = a + 1; b < placements.size(); ++b) {
      if (placements[a].is_shard() && placements[b].is_shard(placements[a].dim())) {
        return true;
      }
    }
  }
  return false;
}

/// Returns the order in which axes shard, equal for all tensors of the call: an axis that shards outside splits the op
/// into smaller ones of the same kind, which the next axis splits again. Uses the order of the first operand with a dim
/// that several axes shard, preferring written ones, because those would move twice.
c10::SmallVector<size_t, 4> axis_order(const OpCall& call, size_t mesh_ndim) {
  const Operand* decides = nullptr;
  for (const auto& operand : call.operands) {
    if (operand.spec && shards_a_dim_twice(operand.spec->placements()) &&
        (!decides || (operand.written && !decides->written))) {
      decides = &operand;
    }
  }
  c10::SmallVector<size_t, 4> axes;
  for (size_t axis = 0; axis < mesh_ndim; ++axis) {
    axes.push_back(axis);
  }
  if (decides) {
    std::stable_sort(axes.begin(), axes.end(), [&](size_t a, size_t b) {
      return decides->spec->placements()[a].order() < decides->spec->placements()[b].order();
    });
  }
  return axes;
}

const DeviceMesh& mesh_of_operands(const OpCall& call) {
  const auto first =
      std::ranges::find_if(call.operands, [](const Operand& operand) { return operand.spec != nullptr; });
  TESSERA_ASSERT(first != call.operands.end(), "{} has no DTensor operand", toString(call.op.operator_name()));
  return first->spec->mesh();
}

/// Placements by operand and by output.
struct ChosenPlacements {
  std::vector<Placements> operands;
  std::vector<Placements> outputs;
};

/// Chooses the cheapest strategy along each axis. Without output metas, which strategies may read, replicates
/// everything.
ChosenPlacements choose_placements(const OpRule& rule, OpCall& call, const DeviceMesh& mesh, bool has_output_metas) {
  const auto mesh_ndim = static_cast<size_t>(mesh.ndim());
  const Placements copies(mesh_ndim, Replicate());
  ChosenPlacements chosen{.operands = std::vector<Placements>(call.operands.size(), copies),
                          .outputs = std::vector<Placements>(call.outputs.size(), copies)};
  for (size_t axis = 0; axis < mesh_ndim; ++axis) {
    call.axis = axis;
    call.axis_size = mesh.shape()[axis];
    const auto strategy = choose_cheapest(has_output_metas ? rule.strategies(call) : Strategies(), call);
    for (size_t i = 0; i < chosen.operands.size(); ++i) {
      chosen.operands[i][axis] = strategy.operands[i];
    }
    for (size_t i = 0; i < chosen.outputs.size(); ++i) {
      chosen.outputs[i][axis] = strategy.outputs[i];
    }
  }
  return chosen;
}

void plan_operand(OpPlan& plan, const Operand& operand, const Placements& placements) {
  const auto& spec = operand.spec;
  const bool moves = spec && data_moves(*spec, placements);
  const bool differs = spec && spec->placements() != placements;
  const bool keeps_strides = plan.rule->keeps_strides && moves && is_whole_and_dense(*spec, placements);
  plan.operands.push_back(differs ? spec->with_placements(placements, moves && !keeps_strides) : spec);
  plan.redistribute.push_back(moves);
  plan.writes_back = plan.writes_back || (moves && operand.written);
}

}  // namespace

bool has_nothing_to_compute(const OpPlan& plan) {
  const auto is_sharded = [](const SpecPtr& spec) {
    return spec && std::ranges::any_of(spec->placements(), [](const auto& placement) { return placement.is_shard(); });
  };
  const auto empty_here = [](const SpecPtr& spec) { return is_empty(spec->local_sizes()); };
  const auto empty_everywhere = [](const SpecPtr& spec) { return is_empty(spec->sizes()); };
  return !plan.outputs.empty() && std::ranges::all_of(plan.outputs, empty_here) &&
         (!std::ranges::all_of(plan.outputs, empty_everywhere) || std::ranges::any_of(plan.operands, is_sharded));
}

OpPlan propagate(const OpRule& rule, OpCall& call) {
  const auto& mesh = mesh_of_operands(call);
  OpPlan plan;
  plan.rule = &rule;
  plan.outputs_from_results = !plan_output_metas(rule, call);
  auto chosen = choose_placements(rule, call, mesh, !plan.outputs_from_results);
  const auto order = axis_order(call, static_cast<size_t>(mesh.ndim()));
  for (size_t i = 0; i < call.operands.size(); ++i) {
    plan_operand(plan, call.operands[i], with_shard_order(std::move(chosen.operands[i]), order));
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    plan.outputs.push_back(
        DTensorSpec::make(mesh, with_shard_order(std::move(chosen.outputs[i]), order), call.outputs[i]));
  }
  plan.offsets = std::move(call.offsets);
  plan.nothing_to_compute = !rule.runs_on_empty_shards && has_nothing_to_compute(plan);
  plan.must_dry_run = must_dry_run(call, rule, plan);
  plan.operand_strides_changed = operand_strides_changed(call, plan);
  return plan;
}

}  // namespace tessera
