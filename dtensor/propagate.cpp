#include "dtensor/propagate.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace tessera {

namespace {

at::Tensor meta_tensor(const TensorMeta& meta) {
  return at::empty_strided(meta.sizes, meta.strides, at::TensorOptions().dtype(meta.dtype).device(at::kMeta));
}

/// As many dims as `meta` has, all of size 1.
at::Tensor one_element(const TensorMeta& meta) {
  return at::ones(DimVector(meta.sizes.size(), 1), at::TensorOptions().dtype(meta.dtype));
}

/// An op takes a number that is a tensor of the CPU beside tensors of any device, but none of another GPU or meta.
bool goes_with(const at::Tensor& number, c10::DeviceType device) {
  return number.is_cpu() || number.device().type() == device;
}

/// The arguments with stand-ins for the operands, made by `make` on `device`.
template <class Make>
torch::jit::Stack stand_in_arguments(const OpCall& call, c10::DeviceType device, Make make) {
  torch::jit::Stack stack(call.args.begin(), call.args.end());
  size_t next = 0;
  const auto& schema = call.op.schema().arguments();
  for (size_t i = 0; i < stack.size(); ++i) {
    auto& value = stack[i];
    if (value.isTensor()) {
      if (next < call.operands.size() && call.operands[next].arg == i) {
        const auto& operand = call.operands[next++];
        if (operand.spec || !goes_with(value.toTensor(), device)) {
          value = make(operand.meta);
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
        const c10::IValue entry = list.get(k);
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

/// The defined tensors of an op's results, lists opened.
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

std::vector<TensorMeta> metas_of(const std::vector<at::Tensor>& tensors) {
  std::vector<TensorMeta> metas;
  for (const auto& tensor : tensors) {
    metas.push_back(TensorMeta::of(tensor));
  }
  return metas;
}

}  // namespace

std::vector<TensorMeta> infer_output_metas(const OpCall& call, std::vector<int64_t>* offsets) {
  auto stack = stand_in_arguments(call, at::kMeta, meta_tensor);
  call.op.callBoxed(stack);
  const auto tensors = result_tensors(stack);
  for (size_t i = 0; offsets && i < tensors.size(); ++i) {
    offsets->push_back(tensors[i].storage_offset());
  }
  return metas_of(tensors);
}

std::vector<TensorMeta> probe_output_metas(const OpCall& call,
                                           const std::function<DimVector(const TensorMeta&)>& sizes) {
  const auto device = call.operands[0].spec->mesh().device_type();
  auto stack = stand_in_arguments(call, device, [&](const TensorMeta& meta) {
    return at::ones(sizes(meta), at::TensorOptions().dtype(meta.dtype).device(device));
  });
  call.op.callBoxed(stack);
  return metas_of(result_tensors(stack));
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

namespace {

/// False if only running the op can tell the metas: their sizes depend on data, or there is no meta kernel.
bool plan_output_metas(const OpRule& rule, OpCall& call) {
  if (rule.whole_only && rule.whole_only(call)) {
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

/// Local kernels on empty shards raise, crash or change dtypes, so they are not called where all they could compute
/// is empty. An op on an empty tensor is left to its kernel, which may refuse it, on every rank; but where that tensor
/// is cut, some ranks' kernels would refuse what only their shards lack, such as a channel of no items.
bool has_nothing_to_compute(const OpPlan& plan) {
  const auto is_cut = [](const SpecPtr& spec) {
    return spec && std::ranges::any_of(spec->placements(), [](const auto& placement) { return placement.is_shard(); });
  };
  const auto empty_here = [](const SpecPtr& spec) { return is_empty(spec->local_sizes()); };
  const auto empty_everywhere = [](const SpecPtr& spec) { return is_empty(spec->sizes()); };
  return !plan.outputs.empty() && std::ranges::all_of(plan.outputs, empty_here) &&
         (!std::ranges::all_of(plan.outputs, empty_everywhere) || std::ranges::any_of(plan.operands, is_cut));
}

/// Whether this rank has no element of an operand of which others have some, so that its kernel might take what theirs
/// refuse, and the op may be called on zeros to find out: it draws nothing, is no view, and has no effect that could be
/// a program's own. Of lists only where all tensors are empty here: else they would be all of a model's parameters.
bool has_to_ask(const OpCall& call, const OpRule& rule, const OpPlan& plan) {
  const auto lacks_elements = [](const SpecPtr& spec) {
    return spec && is_empty(spec->local_sizes()) && !is_empty(spec->sizes());
  };
  if (std::ranges::none_of(plan.operands, lacks_elements)) {
    return false;
  }
  if (rule.asks_kernel) {
    return !plan.nothing_here;  // else it asks at each call
  }
  const auto& schema = call.op.schema();
  const auto is_view = [](const c10::Argument& result) { return result.alias_info() && !is_written(result); };
  return (!rule.local_call || rule.op_takes_shards) && call.op.operator_name().getNamespace() == "aten" &&
         !call.op.hasTag(at::Tag::nondeterministic_seeded) && std::ranges::none_of(schema.returns(), is_view) &&
         (plan.nothing_here ||
          std::ranges::none_of(call.args, [](const c10::IValue& value) { return value.isTensorList(); }));
}

/// Moved operands are row-major, which may tell kernels to lay out results otherwise than those of the whole operands.
bool lies_otherwise(const OpCall& call, const OpPlan& plan) {
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (plan.redistribute[i] && plan.operands[i]->strides() != at::IntArrayRef(call.operands[i].meta.strides)) {
      return true;
    }
  }
  return false;
}

/// Along an axis of one rank all placements are the same data.
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

bool cuts_a_dim_twice(const Placements& placements) {
  for (size_t a = 0; a < placements.size(); ++a) {
    for (size_t b = a + 1; b < placements.size(); ++b) {
      if (placements[a].is_shard() && placements[b].is_shard(placements[a].dim())) {
        return true;
      }
    }
  }
  return false;
}

/// The order in which the axes cut, one for all tensors of the call: an axis whose cut is outer splits the op into
/// smaller ones of the same kind, which the next axis splits again. It is that of the first operand of which several
/// axes cut one dim, written ones before others, since those would move twice.
c10::SmallVector<size_t, 4> axis_order(const OpCall& call, size_t mesh_ndim) {
  const Operand* decides = nullptr;
  for (const auto& operand : call.operands) {
    if (operand.spec && cuts_a_dim_twice(operand.spec->placements()) &&
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

}  // namespace

OpPlan propagate(const OpRule& rule, OpCall& call) {
  const DTensorSpec* first = nullptr;
  for (const auto& operand : call.operands) {
    first = operand.spec && !first ? operand.spec.get() : first;
  }
  TESSERA_ASSERT(first != nullptr, "{} has no DTensor operand", toString(call.op.operator_name()));
  const auto& mesh = first->mesh();
  OpPlan plan;
  plan.rule = &rule;
  plan.outputs_from_results = !plan_output_metas(rule, call);

  const auto mesh_ndim = static_cast<size_t>(mesh.ndim());
  std::vector<Placements> operands(call.operands.size(), Placements(mesh_ndim, Replicate()));
  std::vector<Placements> outputs(call.outputs.size(), Placements(mesh_ndim, Replicate()));
  for (size_t axis = 0; axis < mesh_ndim; ++axis) {
    call.axis = axis;
    call.axis_size = mesh.shape()[axis];
    const auto strategy = plan.outputs_from_results ? cheapest_of({}, call) : cheapest_of(rule.strategies(call), call);
    for (size_t i = 0; i < operands.size(); ++i) {
      operands[i][axis] = strategy.operands[i];
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      outputs[i][axis] = strategy.outputs[i];
    }
  }

  const auto order = axis_order(call, mesh_ndim);
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto& spec = call.operands[i].spec;
    operands[i] = with_cut_order(std::move(operands[i]), order);
    const bool moves = spec && data_moves(*spec, operands[i]);
    const bool differs = spec && spec->placements() != operands[i];
    const bool keeps_strides = rule.keeps_strides && moves && is_whole_and_dense(*spec, operands[i]);
    plan.operands.push_back(differs ? spec->with_placements(operands[i], moves && !keeps_strides) : spec);
    plan.redistribute.push_back(moves);
    plan.writes_back = plan.writes_back || (moves && call.operands[i].written);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    plan.outputs.push_back(DTensorSpec::make(mesh, with_cut_order(std::move(outputs[i]), order), call.outputs[i]));
  }
  plan.offsets = std::move(call.offsets);
  plan.nothing_here = !rule.runs_on_empty_shards && has_nothing_to_compute(plan);
  plan.has_to_ask = has_to_ask(call, rule, plan);
  plan.lies_otherwise = lies_otherwise(call, plan);
  return plan;
}

}  // namespace tessera
