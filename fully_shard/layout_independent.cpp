#include "fully_shard/layout_independent.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/spec/shard_math.h"
#include "fully_shard/autograd/backward_hooks.h"
#include "fully_shard/engine/fsdp_state.h"
#include "fully_shard/engine/unit_tree.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/layout/stacked_spec.h"
#include "fully_shard/reduce/tree_reduction.h"
#include "nn/hooks/hook_point.h"

namespace tessera {

namespace {

bool is_power_of_two(int64_t number) {
  return number > 0 && std::has_single_bit(static_cast<uint64_t>(number));
}

/// Returns the placements on the tensor-parallel axes; empty for a parameter with only data parallelism.
Placements tp_placements(const ShardedParam& param, const DataParallelAxes& axes) {
  const auto& placements = param.spec()->placements();
  return {placements.begin() + axes.mesh.ndim(), placements.end()};
}

void check_unit(const FSDPState& state, const DataParallelAxes& axes) {
  const auto& group = *state.group();
  TESSERA_CHECK(NotImplementedError,
                group.context().axes.mesh == axes.mesh && group.context().axes.shard_axis == axes.shard_axis,
                "LayoutIndependentGradients: the unit {} has another mesh than the first one, or only one of them is "
                "sharded; give all units the same",
                state.label());
  const auto reduce_dtype = group.context().reduce_dtype.value_or(at::kFloat);
  TESSERA_CHECK(NotImplementedError,
                is_power_of_two(axes.mesh.size()) || (reduce_dtype != at::kHalf && reduce_dtype != at::kBFloat16),
                "LayoutIndependentGradients: on {} ranks, which is no power of two, gradients of {} are reduced in {}; "
                "set reduce_dtype to float32",
                axes.mesh.size(), state.label(), c10::toString(reduce_dtype));
  for (const auto& param : group.params()) {
    const Placements tp = tp_placements(param, axes);
    TESSERA_CHECK(NotImplementedError,
                  tp.size() <= 1 && param.spec()->placements() == stacked_placements(axes.placements(0), tp),
                  "LayoutIndependentGradients: parameter '{}' of {} is a {}; data parallelism must shard dim 0, and "
                  "tensor parallelism have one axis: leave out shard_placement_fn",
                  param.origin().name, param.origin().module, param.spec()->to_string());
  }
}

struct TrainedParam {
  at::Tensor tensor;
  int64_t rows;             // along dim 0, over all data-parallel ranks
  Placements tp_placement;  // one or none
};

const ShardedParam& sharded_param(const at::Tensor& tensor, const std::string& name) {
  const auto owner = find_owner(tensor);
  TESSERA_CHECK(ValueError, owner != nullptr,
                "LayoutIndependentGradients: parameter '{}' requires a gradient, but is in no unit, so that nothing "
                "adds the ranks' gradients; freeze it, or leave it out of ignored_params",
                name);
  const auto& params = owner->group()->params();
  return *std::ranges::find_if(params, [&](const ShardedParam& param) { return param.param().is_same(tensor); });
}

/// Returns the trained parameters, each once.
std::vector<TrainedParam> trained_params(const torch::nn::Module& model, const DataParallelAxes& axes) {
  std::unordered_set<c10::TensorImpl*> seen;
  std::vector<TrainedParam> params;
  for (const auto& item : model.named_parameters()) {
    const auto& tensor = item.value();
    if (tensor.requires_grad() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      const auto& param = sharded_param(tensor, item.key());
      params.push_back({tensor, param.unsharded().size(0), tp_placements(param, axes)});
    }
  }
  return params;
}

/// Returns the tensor-parallel group; null without one, or for one rank.
ProcessGroupPtr tp_group(const std::vector<NamedState>& units, const DataParallelAxes& axes) {
  std::optional<DeviceMesh> mesh;
  for (const auto& [path, state] : units) {
    if (!state->group()) {
      continue;
    }
    for (const auto& param : state->group()->params()) {
      if (tp_placements(param, axes).empty()) {
        continue;
      }
      TESSERA_CHECK(NotImplementedError, !mesh || *mesh == param.spec()->mesh(),
                    "LayoutIndependentGradients: parameter '{}' of {} is on {}, others are on {}; use one mesh for "
                    "tensor parallelism",
                    param.origin().name, param.origin().module, param.spec()->mesh(), *mesh);
      mesh = param.spec()->mesh();
    }
  }
  return mesh && mesh->size(axes.mesh.ndim()) > 1 ? mesh->group(axes.mesh.ndim()) : nullptr;
}

/// Returns the local tensors of gradients that are defined in both lists.
std::vector<at::Tensor> locals(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& others) {
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined() && others[i].defined()) {
      result.push_back(dtensor_meta(gradients[i])->local);
    }
  }
  return result;
}

/// Adds `terms` to `sums`.
void add_gradients(std::vector<at::Tensor>& sums, std::vector<at::Tensor>& terms) {
  const at::NoGradGuard no_grad;
  if (const auto own = locals(sums, terms); !own.empty()) {
    at::_foreach_add_(own, locals(terms, sums));
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    sums[i] = sums[i].defined() ? sums[i] : std::move(terms[i]);
  }
}

/// Sums in an order that depends only on the number of values.
template <class Value>
double sum_squares(const Value* values, int64_t count) {
  constexpr int64_t kLanes = 8;
  std::array<double, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(values[i + lane]);
      sums[static_cast<size_t>(lane)] += value * value;
    }
  }
  for (; i < count; ++i) {
    const auto value = static_cast<double>(values[i]);
    sums[static_cast<size_t>(i % kLanes)] += value * value;
  }
  double total = 0;
  for (const double sum : sums) {
    total += sum;
  }
  return total;
}

/// Writes the sum of squares of each row along dim 0.
void write_row_squares(const at::Tensor& local, double* squares) {
  const bool is_double = local.scalar_type() == at::kDouble;
  const at::Tensor values = local.to(is_double ? at::kDouble : at::kFloat).contiguous();
  const int64_t rows = values.size(0), width = rows == 0 ? 0 : values.numel() / rows;
  for (int64_t row = 0; row < rows; ++row) {
    squares[row] = is_double ? sum_squares(values.const_data_ptr<double>() + row * width, width)
                             : sum_squares(values.const_data_ptr<float>() + row * width, width);
  }
}

/// Returns the local loss, which may be a DTensor with tensor parallelism.
at::Tensor local_loss(const at::Tensor& loss) {
  return is_dtensor(loss) ? full_tensor(loss.detach()) : loss.detach();
}

double sum_in_order(const at::Tensor& values) {
  const auto* data = values.const_data_ptr<double>();
  return std::accumulate(data, data + values.numel(), 0.0);
}

}  // namespace

struct LayoutIndependentGradients::Impl {
  using Gradients = std::vector<at::Tensor>;  // one per parameter, may be undefined
  /// Gradients of aligned blocks of parts.
  struct TreeNode {
    int64_t parts;
    Gradients gradients;
  };

  torch::nn::Module& model;
  int64_t parts;
  DataParallelAxes axes = {};
  std::vector<TrainedParam> params = {};
  ProcessGroupPtr tp = nullptr;
  int64_t block_parts = 1;  // computed by all ranks together
  TreeParts own = {};       // this rank's parts of a block
  int64_t passes = 1;       // per rank and block

  void set_up();
  void run_passes(const std::function<void(int64_t part, bool is_repeated, bool is_last)>& run,
                  const std::function<void()>& after_block) const;
  double mean_of(const at::Tensor& losses) const;
  Gradients take_gradients();
  double sum_gradient_squares() const;
};

void LayoutIndependentGradients::Impl::set_up() {
  const auto states = fsdp_states(model);
  const auto has_params = [](const NamedState& unit) { return unit.state->group() != nullptr; };
  const auto first = std::ranges::find_if(states, has_params);
  TESSERA_CHECK(StateError, find_fsdp_state(model) != nullptr && first != states.end(),
                "LayoutIndependentGradients: {} is no unit, or has no parameters; call fully_shard or replicate on it",
                module_type_name(model));
  axes = first->state->group()->context().axes;
  const int64_t ranks = axes.mesh.size();
  block_parts = least_parts(ranks);
  TESSERA_CHECK(ValueError, is_power_of_two(parts) && parts >= block_parts,
                "LayoutIndependentGradients: {} parts for {} ranks; it must be a power of two, at least {}", parts,
                ranks, block_parts);
  TESSERA_CHECK(NotImplementedError, axes.mesh.device_type() == at::kCPU,
                "LayoutIndependentGradients: the mesh is of {} devices, whose kernels' sums may depend on the layout; "
                "use the CPU",
                c10::DeviceTypeName(axes.mesh.device_type(), /*lower_case=*/true));
  TESSERA_CHECK(NotImplementedError, !axes.shard_axis || is_power_of_two(axes.num_replicas()),
                "LayoutIndependentGradients: {} replicas of shards over {} ranks; their number must be a power of two, "
                "or shard over all ranks",
                axes.num_replicas(), axes.num_shards());
  own = tree_parts(axes.mesh.local_rank(), ranks, block_parts);
  passes = is_power_of_two(ranks) ? 1 : 2;
  for (const auto& [path, state] : states) {
    if (state->group()) {
      check_unit(*state, axes);
    }
  }
  params = trained_params(model, axes);
  tp = tp_group(states, axes);
  TESSERA_CHECK(NotImplementedError, !tp || is_power_of_two(ranks),
                "LayoutIndependentGradients: {} ranks of data parallelism beside tensor parallelism, which would add "
                "some parts before tensor parallelism's ranks are added, and others after; use a power of two",
                ranks);
  for (const auto& [path, state] : states) {
    auto& gradients = state->settings().gradients;
    gradients.divide_factor = 1;  // losses are divided
    gradients.reduce_scatter = tree_reduce_scatter;
    gradients.all_reduce = tree_all_reduce;
  }
}

/// All ranks run equally many passes, since each pass gathers parameters. A rank with one part in a block of two passes
/// runs that part twice.
void LayoutIndependentGradients::Impl::run_passes(
    const std::function<void(int64_t part, bool is_repeated, bool is_last)>& run,
    const std::function<void()>& after_block) const {
  for (int64_t block = 0; block < parts; block += block_parts) {
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t number = pass - (passes - own.count);
      run(block + own.first + std::max<int64_t>(number, 0), /*is_repeated=*/number < 0, /*is_last=*/pass + 1 == passes);
    }
    after_block();
  }
}

/// Returns the mean. `losses` has the losses of this rank's parts and zeros.
double LayoutIndependentGradients::Impl::mean_of(const at::Tensor& losses) const {
  for (int64_t axis = 0; axis < axes.mesh.ndim(); ++axis) {
    if (axes.mesh.size(axis) > 1) {
      all_reduce(losses, ReduceOp::Sum, axes.mesh.group(axis));
    }
  }
  return sum_in_order(losses) / static_cast<double>(parts);
}

LayoutIndependentGradients::Impl::Gradients LayoutIndependentGradients::Impl::take_gradients() {
  Gradients gradients;
  gradients.reserve(params.size());
  for (auto& param : params) {
    gradients.push_back(std::exchange(param.tensor.mutable_grad(), at::Tensor()));
  }
  return gradients;
}

/// Sums the squares within each row along dim 0, then over rows, then over tensor-parallel ranks, the first of which
/// counts replicated gradients.
double LayoutIndependentGradients::Impl::sum_gradient_squares() const {
  const bool is_first = !tp || tp->getRank() == 0;
  const auto is_counted = [&](const TrainedParam& param) {
    return param.tensor.grad().defined() &&
           (is_first || (!param.tp_placement.empty() && !param.tp_placement[0].is_replicate()));
  };
  int64_t rows = 0;
  for (const auto& param : params) {
    rows += is_counted(param) ? param.rows : 0;
  }
  at::Tensor squares = at::zeros({rows}, at::kDouble);
  auto* of_param = squares.mutable_data_ptr<double>();
  for (const auto& param : params) {
    if (is_counted(param)) {
      const auto shard = chunk_range(param.rows, axes.num_shards(), axes.shard_rank());
      write_row_squares(dtensor_meta(param.tensor.grad())->local, of_param + shard.offset);
      of_param += param.rows;
    }
  }
  if (axes.num_shards() > 1) {
    all_reduce(squares, ReduceOp::Sum, axes.shard_group());  // other ranks have zeros there
  }
  const double own_sum = sum_in_order(squares);
  if (!tp) {
    return own_sum;
  }
  const at::Tensor sums = at::zeros({static_cast<int64_t>(tp->getSize())}, at::kDouble);
  all_gather(sums, at::full({1}, own_sum, at::kDouble), tp);
  return sum_in_order(sums);
}

LayoutIndependentGradients::LayoutIndependentGradients(ModuleRef model, LayoutIndependentOptions options)
    : impl_(std::make_unique<Impl>(Impl{.model = *model, .parts = options.parts})) {
  impl_->set_up();
}

LayoutIndependentGradients::~LayoutIndependentGradients() = default;

double LayoutIndependentGradients::backward(const PartLoss& loss_of_part) {
  auto& own = *impl_;
  auto previous = own.take_gradients();
  const at::Tensor losses = at::zeros({own.parts}, at::kDouble);
  std::vector<Impl::TreeNode> tree;
  const auto run = [&](int64_t part, bool is_repeated, bool is_last) {
    fsdp(own.model).set_requires_gradient_sync(is_last);
    const at::Tensor loss = loss_of_part(part);
    (loss * (is_repeated ? 0 : 1 / static_cast<double>(own.parts))).backward();
    if (!is_repeated) {
      losses[part].copy_(local_loss(loss));
    }
  };
  own.run_passes(run, [&] {
    Impl::TreeNode node{.parts = own.block_parts, .gradients = own.take_gradients()};
    while (!tree.empty() && tree.back().parts == node.parts) {
      add_gradients(tree.back().gradients, node.gradients);
      node = {.parts = 2 * node.parts, .gradients = std::move(tree.back().gradients)};
      tree.pop_back();
    }
    tree.push_back(std::move(node));
  });
  auto& sums = tree.at(0).gradients;
  add_gradients(sums, previous);
  for (size_t i = 0; i < own.params.size(); ++i) {
    own.params[i].tensor.mutable_grad() = sums[i];
  }
  return own.mean_of(losses);
}

double LayoutIndependentGradients::evaluate(const PartLoss& loss_of_part) {
  const at::NoGradGuard no_grad;
  const at::Tensor losses = at::zeros({impl_->parts}, at::kDouble);
  const auto run = [&](int64_t part, bool is_repeated, bool) {
    const at::Tensor loss = loss_of_part(part);
    if (!is_repeated) {
      losses[part].copy_(local_loss(loss));
    }
  };
  impl_->run_passes(run, [] {});
  return impl_->mean_of(losses);
}

at::Tensor LayoutIndependentGradients::clip_grad_norm(double max_norm) {
  std::vector<at::Tensor> tensors;
  bool has_double = false;
  for (const auto& param : impl_->params) {
    tensors.push_back(param.tensor);
    has_double = has_double || (param.tensor.grad().defined() && param.tensor.grad().scalar_type() == at::kDouble);
  }
  at::Tensor norm =
      at::full({}, std::sqrt(impl_->sum_gradient_squares()), at::dtype(has_double ? at::kDouble : at::kFloat));
  clip_grads_with_norm_(tensors, max_norm, norm);
  return norm;
}

}  // namespace tessera
