// Fused optimizer steps: parameter, gradient and states of one place are cut alike, which optimizers do anyway; then
// the step is one local call without communication. Whatever lies otherwise is moved, and written states moved back.
//
// Where all lies alike, which is what optimizers call, the step bypasses dispatch(): to box, hash and compare a
// thousand tensors costs more than a step of small ones.

#include <ATen/core/boxing/impl/boxing.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_adagrad_ops.h>
#include <ATen/ops/_fused_adam_ops.h>
#include <ATen/ops/_fused_adamw_ops.h>
#include <ATen/ops/_fused_sgd_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "dtensor/dispatch.h"
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

/// This rank's local tensors of a step's lists, without the places where it has nothing.
class LocalLists {
 public:
  explicit LocalLists(at::TensorList params) : params_(params) {}

  /// Whether every list that was taken lies as the parameters do, so that the step is right on the local tensors.
  bool lie_alike() const { return lie_alike_; }

  at::TensorList take(at::TensorList list) {
    auto& taken = lists_.at(num_lists_++);
    if (list.empty()) {
      return {};
    }
    lie_alike_ = lie_alike_ && list.size() == params_.size();
    taken.locals.reserve(list.size());
    for (size_t i = 0; lie_alike_ && i < list.size(); ++i) {
      take(list[i], i, taken);
    }
    return taken.locals;
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

  /// As dispatch() does after a write: all lists of DTensors are written.
  void bump_versions() const {
    for (const auto& [locals, of_dtensors] : lists_) {
      for (const auto& local : locals) {
        if (of_dtensors && !local.is_inference()) {
          local.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  }

 private:
  struct List {
    std::vector<at::Tensor> locals;
    bool of_dtensors = true;  // and not step counts
  };

  void take(const at::Tensor& tensor, size_t i, List& taken) {
    const auto* param = dtensor_meta(params_[i]);
    const auto* meta = dtensor_meta(tensor);
    const bool is_step_count = !meta && tensor.dim() == 0 && params_[i].dim() > 0;
    lie_alike_ = param && (is_step_count || (meta && !meta->copied_view && same_spec(meta->spec, param->spec) &&
                                             !param->spec->has_partial()));
    taken.of_dtensors = taken.of_dtensors && meta;
    if (lie_alike_ && param->local.numel() > 0) {
      taken.locals.push_back(meta ? meta->local : tensor);
    }
  }

  const at::TensorList params_;
  std::array<List, 6> lists_;
  size_t num_lists_ = 0;
  bool lie_alike_ = true;
};

/// The kernel of a fused op on DTensors.
template <class Op, class Signature = typename Op::schema>
struct FusedStep;

template <class Op, class... Args>
struct FusedStep<Op, void(at::TensorList, Args...)> {
  static void call(at::TensorList params, Args... args) {
    LocalLists lists(params);
    const std::tuple<at::TensorList, Args...> locals{lists.take(params), lists.take(args)...};  // in this order
    if (!lists.lie_alike()) {
      static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
      auto stack = c10::impl::boxArgs<at::TensorList, Args...>(params, args...);
      dispatch(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
    } else if (!std::get<0>(locals).empty()) {
      std::apply(Op::call, locals);
      lists.bump_versions();
    }
  }
};

template <class Op>
void register_step(torch::Library& library) {
  const std::string overload = Op::overload_name;
  library.impl((Op::name + (overload.empty() ? "" : "." + overload)).c_str(), &FusedStep<Op>::call);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
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
