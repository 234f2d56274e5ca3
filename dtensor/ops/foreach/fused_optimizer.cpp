// Fused optimizer steps: the parameter, gradient and states at one index are placed equally, as optimizers do anyway,
// so the step is one local call without communication. Tensors with other placements are moved, and written states
// moved back.
//
// With equal layouts, as optimizers have, the step bypasses autograd and dispatch(): to unpack, box, hash and compare a
// thousand tensors costs more than a step of small ones.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "dtensor/dispatch/dispatch.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/ops/list_parts.h"
#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// Step counts have no dims and are therefore replicated.
Strategies step_strategies(const OpCall& part) {
  return pointwise_strategies(part, part.operands[0].meta);
}

constexpr size_t kGrads = 1;  // index among every fused op's arguments, and among its lists

/// Kernels write gradients only if they scale them: grad_scale and found_inf are the last arguments of every fused op.
bool writes(at::ArrayRef<c10::IValue> args, size_t arg) {
  return arg != kGrads || args[args.size() - 2].isTensor() || args[args.size() - 1].isTensor();
}

/// Kernels process the memory of a parameter, its gradient and its states in parallel, ignoring strides, so none may
/// have gaps.
bool has_layout_like(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.sizes() != param.sizes() ||  // for a step count
         (param.is_non_overlapping_and_dense() && tensor.strides() == param.strides());
}

/// Copies of local tensors whose layout differs from their parameter's, for example after a move, or has gaps.
class StridedCopies {
 public:
  at::Tensor like(const at::Tensor& param, const at::Tensor& tensor, bool is_written) {
    if (has_layout_like(tensor, param)) {
      return tensor;
    }
    const bool is_dense = param.is_non_overlapping_and_dense();
    auto copy = (is_dense ? at::empty_strided(param.sizes(), param.strides(), tensor.options())
                          : at::empty(param.sizes(), tensor.options()))
                    .copy_(tensor);
    if (is_written) {
      copies_.emplace_back(tensor, copy);
    }
    return copy;
  }
  void copy_back() const {
    for (const auto& [tensor, copy] : copies_) {
      tensor.copy_(copy);
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

/// Skips parameters of which this rank has no elements; kernels are not called for them.
void local_step(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  const auto params = local_argument(op, stack, 0).toTensorVector();
  const size_t num_args = op.schema().arguments().size();
  StridedCopies copies;
  bool any = false;
  for (size_t arg = 0; arg < num_args; ++arg) {
    auto& value = local_argument(op, stack, arg);
    if (!value.isTensorList() || value.toTensorList().size() != params.size()) {
      continue;
    }
    const bool is_written = writes(torch::jit::last(*stack, num_args), arg);
    std::vector<at::Tensor> kept;
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].numel() > 0) {
        kept.push_back(copies.like(params[i], value.toTensorList().get(i), is_written));
        any = true;
      }
    }
    value = c10::IValue(std::move(kept));
  }
  if (any) {
    op.callBoxed(stack);
    copies.copy_back();
  } else {
    torch::jit::drop(*stack, num_args);
  }
}

const RegisterOpRules fused_optimizer_rules([] {
  auto rule = rule_by_parts(step_strategies);
  rule.local_call = local_step;
  rule.writes = writes;
  rule.output_metas = [](const OpCall&) { return std::vector<TensorMeta>(); };
  for (const char* optimizer : {"adam", "adamw", "sgd", "adagrad"}) {
    const std::string name = std::string("aten::_fused_") + optimizer + "_";
    register_op_rule({name, name + ".tensor_lr"}, rule);
  }
});

/// Borrowed tensors in a list that ops accept. Reference counting of a thousand tensors costs more than a step of small
/// ones: each count is an atomic write to memory that is not in the cache.
class BorrowedTensors {
 public:
  BorrowedTensors() = default;
  BorrowedTensors(const BorrowedTensors&) = delete;
  BorrowedTensors& operator=(const BorrowedTensors&) = delete;
  ~BorrowedTensors() {
    for (auto& tensor : tensors_) {
      Traits::destroyBorrow(tensor);
    }
  }

  void reserve(size_t size) { tensors_.reserve(size); }
  void push_back(const at::Tensor& tensor) { tensors_.push_back(Traits::createBorrow(tensor)); }
  at::TensorList list() const { return tensors_; }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  std::vector<at::Tensor> tensors_;
};

/// This rank's local tensors of a step's lists, which must outlive this, without indices where it has no elements. Also
/// counts versions of written tensors, since a thousand tensors have left the cache by the end.
class LocalLists {
 public:
  struct Writes {
    bool counts_dtensors = false;  // like autograd; local tensors are always counted, as in dispatch()
    bool has_grads = false;        // kernels write gradients only if they scale them
  };

  LocalLists(at::TensorList params, Writes writes) : writes_(writes) {
    params_.reserve(params.size());
    for (const auto& param : params) {
      const auto* meta = dtensor_meta(param);
      same_layout_ = same_layout_ && meta && !meta->spec->has_partial();
      if (!same_layout_) {
        return;
      }
      const bool has_elements = meta->local.numel() > 0, is_row_major = meta->local.is_contiguous();
      params_.push_back({.meta = meta, .has_elements = has_elements, .is_row_major = is_row_major});
    }
  }

  /// Returns whether every list has the layout of the parameters, so that the step on local tensors is correct.
  bool have_same_layout() const { return same_layout_; }

  at::TensorList take(at::TensorList list) {
    const bool is_written = num_lists_ != kGrads || writes_.has_grads;
    auto& locals = lists_.at(num_lists_++);
    same_layout_ = same_layout_ && (list.empty() || list.size() == params_.size());
    locals.reserve(list.size());
    for (size_t i = 0; same_layout_ && i < list.size(); ++i) {
      take(list[i], params_[i], is_written, locals);
    }
    return locals.list();
  }
  const at::Tensor& take(const at::Tensor& value) {
    same_layout_ = same_layout_ && !dtensor_meta(value);
    return value;
  }
  const std::optional<at::Tensor>& take(const std::optional<at::Tensor>& value) {
    same_layout_ = same_layout_ && !(value && dtensor_meta(*value));
    return value;
  }
  template <class Number>
  const Number& take(const Number& value) {
    return value;
  }

 private:
  /// Properties that every list needs, read only once, because a thousand tensors have left the cache by then.
  struct Param {
    const DTensorMeta* meta;
    bool has_elements;
    bool is_row_major;

    bool has_layout_like(const at::Tensor& local) const {
      return (is_row_major && local.is_contiguous()) || tessera::has_layout_like(local, meta->local);
    }
  };

  void take(const at::Tensor& tensor, const Param& param, bool is_written, BorrowedTensors& locals) {
    const auto* meta = dtensor_meta(tensor);
    const bool is_step_count = !meta && tensor.dim() == 0 && param.meta->spec->ndim() > 0;
    same_layout_ = is_step_count || (meta && !meta->materialized_view && same_spec(meta->spec, param.meta->spec) &&
                                     param.has_layout_like(meta->local));
    if (!same_layout_) {
      return;
    }
    if (meta && is_written) {
      count_write(meta->local);
      if (writes_.counts_dtensors) {
        count_write(tensor);
      }
    }
    if (param.has_elements) {
      locals.push_back(meta ? meta->local : tensor);
    }
  }

  const Writes writes_;
  std::vector<Param> params_;  // up to the first plain or Partial tensor
  std::array<BorrowedTensors, 6> lists_;
  size_t num_lists_ = 0;
  bool same_layout_ = true;
};

/// Kernels of a fused op for DTensors.
template <class Op, class Signature = typename Op::schema>
struct FusedStep;

template <class Op, class... Args>
struct FusedStep<Op, void(at::TensorList, Args...)> {
  /// Replaces autograd's kernel, which has nothing to record if no tensor requires grad, but takes as long for a
  /// thousand small tensors as the optimizer itself. Other calls go to autograd's.
  static void before_autograd(c10::DispatchKeySet keys, at::TensorList params, Args... args) {
    const bool records = c10::GradMode::is_enabled() && (requires_grad(params) || ... || requires_grad(args));
    if (!records && step_on_locals(/*counts_dtensors=*/true, params, args...)) {
      return;
    }
    const auto stock = keys.remove(c10::DispatchKey::AutogradPrivateUse1).add(c10::DispatchKey::AutogradOther);
    Op::redispatch(stock, params, args...);
  }
  static void below_autograd(at::TensorList params, Args... args) {
    if (step_on_locals(/*counts_dtensors=*/false, params, args...)) {
      return;
    }
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    auto stack = c10::impl::boxArgs<at::TensorList, Args...>(params, args...);
    dispatch(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
  }

 private:
  using Locals = std::tuple<at::TensorList, Args...>;

  static bool requires_grad(at::TensorList list) {
    return std::any_of(list.begin(), list.end(), [](const auto& tensor) { return tensor.requires_grad(); });
  }
  template <class Other>
  static bool requires_grad(const Other& /*argument*/) {
    return false;
  }

  /// For grad_scale and found_inf, the optional tensors of these ops.
  static bool is_given(const std::optional<at::Tensor>& tensor) { return tensor.has_value(); }
  template <class Other>
  static bool is_given(const Other& /*argument*/) {
    return false;
  }

  /// Steps if all layouts are equal. Otherwise only counts versions, and returns false.
  static bool step_on_locals(bool counts_dtensors, at::TensorList params, const Args&... args) {
    LocalLists lists(params, {.counts_dtensors = counts_dtensors, .has_grads = (is_given(args) || ...)});
    const Locals locals{lists.take(params), lists.take(args)...};  // in this order
    if (lists.have_same_layout() && !std::get<0>(locals).empty()) {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::apply(Op::call, locals);
    }
    return lists.have_same_layout();
  }
};

template <class Op>
std::string qualified_name() {
  const std::string overload = Op::overload_name;
  return Op::name + (overload.empty() ? "" : "." + overload);
}

template <class... Ops>
struct Steps {
  static void register_before_autograd(torch::Library& library) {
    (library.impl(qualified_name<Ops>().c_str(), &FusedStep<Ops>::before_autograd), ...);
  }
  static void register_below_autograd(torch::Library& library) {
    (library.impl(qualified_name<Ops>().c_str(), &FusedStep<Ops>::below_autograd), ...);
  }
};
using AllSteps = Steps<at::_ops::_fused_adam_, at::_ops::_fused_adam__tensor_lr, at::_ops::_fused_adamw_,
                       at::_ops::_fused_adamw__tensor_lr, at::_ops::_fused_sgd_, at::_ops::_fused_sgd__tensor_lr,
                       at::_ops::_fused_adagrad_, at::_ops::_fused_adagrad__tensor_lr>;

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  AllSteps::register_before_autograd(library);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  AllSteps::register_below_autograd(library);
}

}  // namespace tessera
