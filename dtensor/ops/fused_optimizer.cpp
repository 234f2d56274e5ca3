// Fused optimizer steps: parameter, gradient and states of one place are cut alike, which optimizers do anyway; then
// the step is one local call without communication. Whatever lies otherwise is moved, and written states moved back.
//
// Where all lies alike, which is what optimizers call, the step bypasses autograd and dispatch(): to unpack, box, hash
// and compare a thousand tensors costs more than a step of small ones.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "dtensor/dtensor_impl.h"
#include "dtensor/ops/list_parts.h"
#include "dtensor/ops/pointwise.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

/// The step counts have no dims and so are replicated.
Strategies step_strategies(const OpCall& part) {
  return pointwise_strategies(part, part.operands[0].meta);
}

/// Kernels are not called on parameters of which this rank has nothing.
void local_step(const c10::OperatorHandle& op, torch::jit::Stack* stack, const OpPlan& /*plan*/) {
  const auto has_elements = [](const c10::IValue& tensor) { return tensor.toTensor().numel() > 0; };
  const auto params = local_argument(op, stack, 0).toListRef();
  if (std::all_of(params.begin(), params.end(), has_elements)) {
    op.callBoxed(stack);
    return;
  }
  const auto parameters = local_argument(op, stack, 0).toTensorVector();
  const size_t num_args = op.schema().arguments().size();
  bool any = false;
  for (size_t arg = 0; arg < num_args; ++arg) {
    auto& value = local_argument(op, stack, arg);
    if (!value.isTensorList() || value.toTensorList().size() != parameters.size()) {
      continue;
    }
    std::vector<at::Tensor> kept;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].numel() > 0) {
        kept.push_back(value.toTensorList().get(i));
        any = true;
      }
    }
    value = c10::IValue(std::move(kept));
  }
  if (any) {
    op.callBoxed(stack);
  } else {
    torch::jit::drop(*stack, num_args);
  }
}

const RegisterOpRules rules([] {
  auto rule = rule_by_parts(step_strategies);
  rule.local_call = local_step;
  rule.output_metas = [](const OpCall&) { return std::vector<TensorMeta>(); };
  for (const char* optimizer : {"adam", "adamw", "sgd", "adagrad"}) {
    const std::string name = std::string("aten::_fused_") + optimizer + "_";
    register_op_rule({name, name + ".tensor_lr"}, rule);
  }
});

/// Tensors that somebody else owns, in a list that ops take. To count references of a thousand tensors up and down
/// costs more than a step of small ones: each count is an atomic write to memory that is not in the cache.
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

/// This rank's local tensors of a step's lists, without the places where it has nothing. The lists' tensors live
/// longer.
class LocalLists {
 public:
  explicit LocalLists(at::TensorList params) {
    params_.reserve(params.size());
    for (const auto& param : params) {
      params_.push_back(dtensor_meta(param));
      lie_alike_ = lie_alike_ && params_.back() && !params_.back()->spec->has_partial();
    }
  }

  /// Whether every list that was taken lies as the parameters do, so that the step is right on the local tensors.
  bool lie_alike() const { return lie_alike_; }

  at::TensorList take(at::TensorList list) {
    auto& taken = lists_.at(num_lists_++);
    taken.tensors = list;
    if (list.empty()) {
      return {};
    }
    lie_alike_ = lie_alike_ && list.size() == params_.size();
    taken.locals.reserve(list.size());
    for (size_t i = 0; lie_alike_ && i < list.size(); ++i) {
      take(list[i], i, taken);
    }
    return taken.locals.list();
  }
  const at::Tensor& take(const at::Tensor& value) {
    lie_alike_ = lie_alike_ && !dtensor_meta(value);
    return value;
  }
  const std::optional<at::Tensor>& take(const std::optional<at::Tensor>& value) {
    lie_alike_ = lie_alike_ && !(value && dtensor_meta(*value));
    return value;
  }
  template <class Number>
  const Number& take(const Number& value) {
    return value;
  }

  /// As autograd does after a write of DTensors, and dispatch() of their local tensors.
  void bump_versions() const {
    const auto bump = [](at::TensorList tensors) {
      for (const auto& tensor : tensors) {
        if (!tensor.is_inference()) {
          tensor.unsafeGetTensorImpl()->bump_version();
        }
      }
    };
    for (const auto& [tensors, locals, of_dtensors] : lists_) {
      if (of_dtensors) {
        bump(tensors);
        bump(locals.list());
      }
    }
  }

 private:
  struct List {
    at::TensorList tensors;
    BorrowedTensors locals;
    bool of_dtensors = true;  // and not step counts
  };

  void take(const at::Tensor& tensor, size_t i, List& taken) {
    const auto& param = *params_[i];
    const auto* meta = dtensor_meta(tensor);
    const bool is_step_count = !meta && tensor.dim() == 0 && param.spec->ndim() > 0;
    lie_alike_ = is_step_count || (meta && !meta->copied_view && same_spec(meta->spec, param.spec));
    taken.of_dtensors = taken.of_dtensors && meta;
    if (lie_alike_ && param.local.numel() > 0) {
      taken.locals.push_back(meta ? meta->local : tensor);
    }
  }

  std::vector<const DTensorMeta*> params_;  // null: a plain tensor
  std::array<List, 6> lists_;
  size_t num_lists_ = 0;
  bool lie_alike_ = true;
};

/// What a fused op does to DTensors in the place of autograd's own kernel, which has nothing to record in a step, and
/// takes as long for a thousand small tensors as the optimizer itself. That one is called for the rest.
template <class Op, class Signature = typename Op::schema>
struct FusedStep;

template <class Op, class... Args>
struct FusedStep<Op, void(at::TensorList, Args...)> {
  static void call(c10::DispatchKeySet keys, at::TensorList params, Args... args) {
    LocalLists lists(params);
    const std::tuple<at::TensorList, Args...> locals{lists.take(params), lists.take(args)...};  // in this order
    if (c10::GradMode::is_enabled() || !lists.lie_alike()) {
      const auto stock = keys.remove(c10::DispatchKey::AutogradPrivateUse1).add(c10::DispatchKey::AutogradOther);
      Op::redispatch(stock, params, args...);
      return;
    }
    if (!std::get<0>(locals).empty()) {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::apply(Op::call, locals);
    }
    lists.bump_versions();
  }
};

template <class Op>
void register_step(torch::Library& library) {
  const std::string overload = Op::overload_name;
  library.impl((Op::name + (overload.empty() ? "" : "." + overload)).c_str(), &FusedStep<Op>::call);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  register_step<at::_ops::_fused_adam_>(library);
  register_step<at::_ops::_fused_adam__tensor_lr>(library);
  register_step<at::_ops::_fused_adamw_>(library);
  register_step<at::_ops::_fused_adamw__tensor_lr>(library);
  register_step<at::_ops::_fused_sgd_>(library);
  register_step<at::_ops::_fused_sgd__tensor_lr>(library);
  register_step<at::_ops::_fused_adagrad_>(library);
  register_step<at::_ops::_fused_adagrad__tensor_lr>(library);
}

}  // namespace tessera
