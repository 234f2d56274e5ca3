#include "parallel/linear_cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/spec/shard_math.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMinRowsAtOnce = 512;  // with fewer, accumulating the weight's gradient costs as much as computing it

/// Work of a rank: rows [rows, features], and its range of classes.
struct LossCall {
  at::Tensor target;                              // [rows]
  DimRange classes;                               // in this rank's weight
  std::optional<DeviceMesh> mesh = std::nullopt;  // ranks with the other classes
  double count = 0;                               // divisor of the sum
  std::optional<double> softcap;
  int64_t rows_at_once = 0;
  bool needs_input = false;  // whether to compute the input's gradient
  bool needs_weight = false;
};

/// Loss of some rows, and its gradients with respect to their logits.
struct ChunkLoss {
  at::Tensor sum;     // scalar
  at::Tensor logits;  // gradients [rows, classes of this rank]; undefined unless needed
};

void reduce(const at::Tensor& tensor, ReduceOp op, const std::optional<DeviceMesh>& mesh) {
  if (mesh) {
    all_reduce(tensor, op, mesh->group());
  }
}

/// Overwrites `logits`. `counts` [rows] is 1 for rows that count, and 0 otherwise.
ChunkLoss loss_of_chunk(at::Tensor logits, const at::Tensor& target, const at::Tensor& counts, const LossCall& call,
                        bool needs_gradient) {
  at::Tensor slope;  // derivative of softcap
  if (call.softcap) {
    const auto bent = (logits / *call.softcap).tanh_();
    slope = needs_gradient ? 1 - bent.square() : at::Tensor();
    logits = bent * *call.softcap;
  }
  const int64_t own = call.classes.length;
  const auto largest = own > 0
                           ? logits.amax(1, /*keepdim=*/true)
                           : at::full({logits.size(0), 1}, -std::numeric_limits<double>::infinity(), logits.options());
  reduce(largest, ReduceOp::Max, call.mesh);
  logits.sub_(largest);
  // Whether this rank has the target's class, and its index.
  const auto is_own = target.ge(call.classes.offset).logical_and_(target.lt(call.classes.offset + own));
  const auto index = (target - call.classes.offset).clamp_(0, std::max<int64_t>(own - 1, 0)).unsqueeze_(1);
  const auto of_target =
      own > 0 ? logits.gather(1, index).squeeze_(1).masked_fill_(is_own.logical_not(), 0) : at::zeros_like(counts);
  logits.exp_();
  const auto sums = at::stack({logits.sum(1), of_target});
  reduce(sums, ReduceOp::Sum, call.mesh);
  ChunkLoss loss{.sum = (sums[0].log() * counts - sums[1]).sum(), .logits = {}};
  if (needs_gradient) {
    logits.mul_((counts / sums[0]).unsqueeze_(1));
    if (own > 0) {
      logits.scatter_add_(1, index, is_own.to(logits.scalar_type()).neg_().unsqueeze_(1));
    }
    loss.logits = slope.defined() ? logits.mul_(slope) : logits;
  }
  return loss;
}

/// Adds left^T * right to `sum`, which may have higher precision.
void add_product(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right) {
  if (sum.scalar_type() == right.scalar_type()) {
    sum.addmm_(left.t(), right);
  } else {
    sum.add_(at::mm(left.t(), right));
  }
}

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const LossCall& call) {
    const auto wide = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const int64_t rows = input.size(0);
    auto loss = at::zeros({}, input.options().dtype(wide));
    const auto of_input = call.needs_input ? at::empty_like(input) : at::Tensor();
    const auto of_weight = call.needs_weight ? at::zeros(weight.sizes(), weight.options().dtype(wide)) : at::Tensor();
    const auto counts = call.target.ge(0).to(wide);
    for (int64_t first = 0; first < rows; first += call.rows_at_once) {
      const int64_t length = std::min(call.rows_at_once, rows - first);
      const auto part = input.narrow(0, first, length);
      auto chunk = loss_of_chunk(at::mm(part, weight.t()).to(wide), call.target.narrow(0, first, length),
                                 counts.narrow(0, first, length), call, call.needs_input || call.needs_weight);
      loss.add_(chunk.sum);
      if (chunk.logits.defined()) {
        chunk.logits = chunk.logits.to(input.scalar_type());
      }
      if (call.needs_input) {
        auto target = of_input.narrow(0, first, length);
        at::mm_out(target, chunk.logits, weight);
      }
      if (call.needs_weight) {
        add_product(of_weight, chunk.logits, part);
      }
    }
    context->save_for_backward({of_input, of_weight});
    context->saved_data["count"] = call.count;
    context->saved_data["dtype"] = weight.scalar_type();
    return loss.div_(call.count);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    TESSERA_CHECK(NotImplementedError, !at::GradMode::is_enabled(),
                  "linear_cross_entropy: backward with create_graph; use at::linear and cross_entropy for it");
    const auto saved = context->get_saved_variables();
    const auto factor = grads[0] / context->saved_data["count"].toDouble();
    const auto scale = [&, keeps = torch::autograd::get_current_graph_task_keep_graph()](const at::Tensor& gradient) {
      const auto own = factor.to(gradient.scalar_type());
      return keeps ? gradient * own : gradient.mul_(own);  // in place unless a later backward needs it
    };
    const auto of_input = saved[0].defined() ? scale(saved[0]) : at::Tensor();
    const auto of_weight =
        saved[1].defined() ? scale(saved[1]).to(context->saved_data["dtype"].toScalarType()) : at::Tensor();
    return {of_input, of_weight, at::Tensor()};
  }
};

void check_operands(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                    const LinearCrossEntropyOptions& options) {
  TESSERA_CHECK(ValueError, input.dim() >= 1 && weight.dim() == 2 && input.size(-1) == weight.size(1),
                "linear_cross_entropy: input [{}] and weight [{}]; give [..., features] and [classes, features]",
                fmt::join(input.sizes(), ", "), fmt::join(weight.sizes(), ", "));
  TESSERA_CHECK(ValueError, input.is_floating_point() && input.scalar_type() == weight.scalar_type(),
                "linear_cross_entropy: input in {} and weight in {}; both must have the same floating dtype",
                c10::toString(input.scalar_type()), c10::toString(weight.scalar_type()));
  TESSERA_CHECK(ValueError,
                !is_dtensor(target) && target.scalar_type() == at::kLong &&
                    target.sizes() == input.sizes().slice(0, static_cast<size_t>(input.dim() - 1)),
                "linear_cross_entropy: target [{}] in {}{}; give a plain tensor of int64, [{}] as input has rows",
                fmt::join(target.sizes(), ", "), c10::toString(target.scalar_type()),
                is_dtensor(target) ? ", a DTensor" : "",
                fmt::join(input.sizes().slice(0, static_cast<size_t>(input.dim() - 1)), ", "));
  TESSERA_CHECK(ValueError, is_dtensor(weight) || !is_dtensor(input),
                "linear_cross_entropy: input is a DTensor and weight is plain; make weight a DTensor, or input plain");
  TESSERA_CHECK(ValueError, options.rows_at_once >= 0,
                "linear_cross_entropy: rows_at_once is {}; 0 or more are allowed", options.rows_at_once);
}

/// Returns targets [rows], with -1 for ignored ones.
at::Tensor checked_target(const at::Tensor& target, int64_t classes, int64_t ignore_index) {
  const auto rows = target.flatten();
  const auto is_ignored = rows == ignore_index;
  const auto is_wrong = rows.lt(0).logical_or_(rows.ge(classes)).logical_and_(is_ignored.logical_not());
  if (rows.is_cpu()) {  // on a GPU, which the host does not wait for, an invalid target counts as ignored
    const auto wrong = rows.masked_select(is_wrong);
    TESSERA_CHECK(ValueError, wrong.numel() == 0,
                  "linear_cross_entropy: a target is {}; allowed are 0 to {}, and {} for rows that do not count",
                  wrong[0].item<int64_t>(), classes - 1, ignore_index);
  }
  return rows.masked_fill(is_ignored.logical_or(is_wrong), -1);
}

int64_t choose_rows_at_once(int64_t rows, const at::Tensor& weight) {
  // Number of rows whose logits take as much memory as the input.
  const int64_t as_input = rows * weight.size(1) / std::max<int64_t>(1, weight.size(0));
  return std::clamp<int64_t>(as_input, kMinRowsAtOnce, std::max(rows, kMinRowsAtOnce));
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                                const LinearCrossEntropyOptions& options) {
  check_operands(input, weight, target, options);
  LossCall call{.target = checked_target(target, weight.size(0), options.ignore_index),
                .classes = {.offset = 0, .length = weight.size(0)},
                .softcap = options.softcap};
  call.count = options.count ? *options.count : call.target.ge(0).sum().item<double>();
  auto own_input = input, own_weight = weight;
  if (is_dtensor(weight)) {
    const auto& mesh = device_mesh(weight);
    const auto placement = placements(weight)[0];
    TESSERA_CHECK(ValueError, mesh.ndim() == 1 && (placement == Shard(0) || placement.is_replicate()),
                  "linear_cross_entropy: weight is {} on a mesh of {} dims; allowed are Shard(0) and Replicate on one",
                  to_string(placements(weight)), mesh.ndim());
    const bool is_sharded = placement.is_shard();
    if (is_sharded) {
      call.classes = chunk_range(weight.size(0), mesh.size(), mesh.local_rank());
      call.mesh = mesh;
    }
    // Each rank of a sharded weight has a term of the input's gradient.
    const Placements whole{Replicate()}, of_gradient{is_sharded ? Placement(Partial()) : Placement(Replicate())};
    own_input = to_local(is_dtensor(input) ? redistribute(input, whole) : from_local(input, mesh, whole), of_gradient);
    own_weight = to_local(weight);
  }
  own_input = own_input.reshape({-1, own_input.size(-1)});
  call.needs_input = at::GradMode::is_enabled() && own_input.requires_grad();
  call.needs_weight = at::GradMode::is_enabled() && own_weight.requires_grad();
  call.rows_at_once =
      options.rows_at_once > 0 ? options.rows_at_once : choose_rows_at_once(own_input.size(0), own_weight);
  return LinearCrossEntropy::apply(own_input, own_weight, call);
}

}  // namespace tessera
