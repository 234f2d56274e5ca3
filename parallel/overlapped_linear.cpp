#include "parallel/overlapped_linear.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/spec/shard_math.h"

namespace tessera {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

thread_local bool overlapping = false;

/// Tensors [..., positions, ..., features] as matrices with a row for each position and index of the other dims, by
/// position first: the ranks' parts lie one below the other, and only the last ones can be short.
class SequenceRows {
 public:
  explicit SequenceRows(SpecPtr input) : input_(std::move(input)), dim_(input_->placements()[0].dim()) {
    for (int64_t dim = 0; dim + 1 < input_->ndim(); ++dim) {
      rows_each_ *= dim == dim_ ? 1 : input_->sizes()[static_cast<size_t>(dim)];
    }
  }

  const DTensorSpec& input() const { return *input_; }
  const ProcessGroupPtr& group() const { return input_->mesh().group(); }

  int64_t rows() const { return positions() * rows_each_; }
  int64_t padded_rows() const { return ranks() * padded_rows_of_rank(); }
  int64_t padded_rows_of_rank() const { return chunk_length(positions(), ranks()) * rows_each_; }
  DimRange own_rows() const {
    const auto own = chunk_range(positions(), ranks(), input_->mesh().local_rank());
    return {own.offset * rows_each_, own.length * rows_each_};
  }

  at::Tensor to_matrix(const at::Tensor& tensor) const { return tensor.movedim(dim_, 0).flatten(0, -2).contiguous(); }

  /// A tensor of these sizes.
  at::Tensor from_matrix(const at::Tensor& matrix, at::IntArrayRef sizes) const {
    auto by_position = sizes.vec();
    std::rotate(by_position.begin(), by_position.begin() + dim_, by_position.begin() + dim_ + 1);
    return matrix.view(by_position).movedim(0, dim_).contiguous();
  }

 private:
  int64_t positions() const { return input_->sizes()[static_cast<size_t>(dim_)]; }
  int64_t ranks() const { return input_->mesh().size(); }

  SpecPtr input_;
  int64_t dim_;
  int64_t rows_each_ = 1;
};

at::Tensor padded(const at::Tensor& matrix, int64_t rows) {
  return matrix.size(0) == rows ? matrix : at::constant_pad_nd(matrix, {0, 0, 0, rows - matrix.size(0)});
}

/// The last dim of `sizes` replaced.
std::vector<int64_t> with_features(at::IntArrayRef sizes, int64_t features) {
  auto result = sizes.vec();
  result.back() = features;
  return result;
}

/// y = x w + b on some rows.
struct RowProduct {
  at::Tensor result, weight, bias;

  void operator()(const at::Tensor& input, int64_t first_row) const {
    if (input.size(0) == 0) {
      return;
    }
    auto part = result.narrow(0, first_row, input.size(0));
    if (bias.defined()) {
      at::addmm_out(part, bias, input, weight);
    } else {
      at::mm_out(part, input, weight);
    }
  }
};

class OverlappedLinear : public torch::autograd::Function<OverlappedLinear> {
 public:
  /// `weight_t` is [in, out].
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight_t,
                            const std::optional<at::Tensor>& bias) {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& operand : {input, weight_t, bias.value_or(at::Tensor())}) {
      if (operand.defined()) {  // it reads local tensors past dispatch, which would check that
        check_not_stale(*dtensor_meta(operand), "ColwiseParallel with overlap");
      }
    }
    const auto layout = c10::make_intrusive<Layout>(dtensor_spec(input), bias.has_value());
    const auto& rows = layout->rows;
    const auto own = rows.to_matrix(dtensor_meta(input)->local);
    const auto gathered = at::empty({rows.padded_rows(), own.size(1)}, own.options());
    const auto sent = padded(own, rows.padded_rows_of_rank());
    auto gather = all_gather_async(gathered, sent, rows.group());

    const auto& weight = dtensor_meta(weight_t)->local;
    const RowProduct multiply{.result = at::empty({rows.rows(), weight.size(1)}, own.options()),
                              .weight = weight,
                              .bias = bias ? dtensor_meta(*bias)->local : at::Tensor()};
    const auto [offset, length] = rows.own_rows();
    multiply(own, offset);
    gather.wait();
    multiply(gathered.narrow(0, 0, offset), 0);
    multiply(gathered.narrow(0, offset + length, rows.rows() - offset - length), offset + length);

    context->save_for_backward(
        {input.requires_grad() ? weight_t : at::Tensor(), weight_t.requires_grad() ? gathered : at::Tensor()});
    context->saved_data["layout"] = c10::IValue::make_capsule(layout);
    return wrap_local(
        rows.from_matrix(multiply.result, with_features(input.sizes(), weight.size(1))),
        DTensorSpec::make(rows.input().mesh(), {Shard(input.dim() - 1)},
                          TensorMeta::contiguous(with_features(input.sizes(), weight_t.size(1)), input.scalar_type())));
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list results(3);
    if (!grads[0].defined()) {
      return results;
    }
    TESSERA_CHECK(
        NotImplementedError, !at::GradMode::is_enabled(),
        "ColwiseParallel with overlap: backward with create_graph, but its gradients cannot be differentiated "
        "again; leave out overlap for layers that need second derivatives");
    const auto grad = redistribute(grads[0], {Shard(-1)});
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto saved = context->get_saved_variables();
    const auto layout = c10::static_intrusive_pointer_cast<Layout>(context->saved_data["layout"].toCapsule());
    const auto& rows = layout->rows;
    const auto matrix = rows.to_matrix(dtensor_meta(grad)->local);
    Pending scatter;
    at::Tensor sent, own;
    if (context->needs_input_grad(0)) {
      const auto& weight = dtensor_meta(saved[0])->local;
      sent = padded(at::mm(matrix, weight.t()), rows.padded_rows());
      own = at::empty({rows.padded_rows_of_rank(), sent.size(1)}, sent.options());
      scatter = reduce_scatter_async(own, sent, ReduceOp::Sum, rows.group());
    }
    if (context->needs_input_grad(1)) {
      results[1] = sharded(at::mm(matrix.t(), saved[1].narrow(0, 0, rows.rows())), grad, rows).t();
    }
    if (layout->has_bias && context->needs_input_grad(2)) {
      results[2] = sharded(matrix.sum(0), grad, rows);
    }
    if (context->needs_input_grad(0)) {
      scatter.wait();
      const auto& input = rows.input();
      results[0] = wrap_local(rows.from_matrix(own.narrow(0, 0, rows.own_rows().length), input.local_sizes()),
                              input.with_placements(input.placements(), /*contiguous=*/true));
    }
    return results;
  }

 private:
  struct Layout : torch::CustomClassHolder {
    Layout(SpecPtr input, bool has_bias) : rows(std::move(input)), has_bias(has_bias) {}
    SequenceRows rows;
    bool has_bias;
  };

  /// A gradient whose dim 0 is the features of `grad`, cut as they are.
  static at::Tensor sharded(const at::Tensor& local, const at::Tensor& grad, const SequenceRows& rows) {
    auto sizes = local.sizes().vec();
    sizes[0] = grad.size(-1);
    return wrap_local(
        local, DTensorSpec::make(rows.input().mesh(), {Shard(0)}, TensorMeta::contiguous(sizes, local.scalar_type())));
  }
};

bool is_cut(const DTensorMeta* meta, const DTensorSpec& like, int64_t dim) {
  return meta && meta->spec->mesh() == like.mesh() && meta->spec->dtype() == like.dtype() &&
         meta->spec->placements()[0].is_shard(dim);
}

/// What does not fit is left to the ops themselves, and to their errors.
bool overlaps(const at::Tensor& input, const at::Tensor& weight_t) {
  const auto* meta = overlapping ? dtensor_meta(input) : nullptr;
  if (!meta || meta->spec->mesh().ndim() != 1) {
    return false;
  }
  const auto& spec = *meta->spec;
  return spec.placements()[0].is_shard() && !spec.placements()[0].is_shard(spec.ndim() - 1) && weight_t.dim() == 2 &&
         is_cut(dtensor_meta(weight_t), spec, 1) && input.size(-1) == weight_t.size(0);
}

at::Tensor matmul(const at::Tensor& input, const at::Tensor& weight_t) {
  return overlaps(input, weight_t) ? OverlappedLinear::apply(input, weight_t, std::optional<at::Tensor>())
                                   : at::native::matmul(input, weight_t);
}

bool fits_bias(const at::Tensor& bias, const at::Tensor& input, const at::Tensor& weight_t) {
  return bias.dim() == 1 && bias.size(0) == weight_t.size(1) && is_cut(dtensor_meta(bias), *dtensor_spec(input), 0);
}

/// ATen's own folds all dims of the input but the last into one, across the cut.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const bool has_bias = bias && bias->defined();
  if (overlapping && dtensor_meta(input) && weight.dim() == 2) {
    const auto weight_t = weight.t();
    if (overlaps(input, weight_t) && (!has_bias || fits_bias(*bias, input, weight_t))) {
      return OverlappedLinear::apply(input, weight_t, has_bias ? bias : std::nullopt);
    }
  }
  return at::native::linear(input, weight, bias);
}

at::Tensor addmm(c10::DispatchKeySet keys, const at::Tensor& bias, const at::Tensor& input, const at::Tensor& weight_t,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  if (overlaps(input, weight_t) && fits_bias(bias, input, weight_t) && beta.equal(1) && alpha.equal(1)) {
    return OverlappedLinear::apply(input, weight_t, std::optional<at::Tensor>(bias));
  }
  // Autograd's own kernel, which this one stands before: it is the same for all backends.
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::addmm", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                               const at::Scalar&, const at::Scalar&)>();
  return op.redispatch(keys.remove(c10::DispatchKey::AutogradPrivateUse1).add(c10::DispatchKey::AutogradOther), bias,
                       input, weight_t, beta, alpha);
}

}  // namespace

OverlapScope::OverlapScope() : previous_(std::exchange(overlapping, true)) {}

OverlapScope::~OverlapScope() {
  overlapping = previous_;
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("linear", TORCH_FN(linear));
  library.impl("matmul", TORCH_FN(matmul));
  library.impl("addmm", TORCH_FN(addmm));
}

}  // namespace tessera
