// Pooling, padding and resampling: they work within the last one, two or three dims, so batch and channels may be cut.

#include "base/error.h"
#include "dtensor/ops/op_names.h"
#include "dtensor/ops/rule_helpers.h"

namespace tessera {

namespace {

constexpr const char* kImages1d = R"(
    reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward upsample_nearest1d
    _upsample_nearest_exact1d upsample_linear1d)";

constexpr const char* kImages2d = R"(
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward reflection_pad2d reflection_pad2d_backward replication_pad2d
    replication_pad2d_backward upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa max_unpool2d)";

constexpr const char* kImages3d = R"(
    max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward adaptive_max_pool3d
    adaptive_max_pool3d_backward reflection_pad3d reflection_pad3d_backward replication_pad3d
    replication_pad3d_backward upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d max_unpool3d)";

// (grad, output_size, input_size, ...)
constexpr const char* kResamplingBackward1d = R"(
    upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward)";
constexpr const char* kResamplingBackward2d = R"(
    upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward
    _upsample_bilinear2d_aa_backward upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward)";
constexpr const char* kResamplingBackward3d = R"(
    upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward)";

/// All dims but the last `spatial`.
Strategies leading_dims(const OpCall& call, int64_t spatial) {
  DimVector touched;
  for (int64_t dim = 1; dim <= spatial; ++dim) {
    touched.push_back(call.operands[0].ndim() - dim);
  }
  return along_dims(call, touched);
}

/// The batch alone, in all tensors, of inputs with a batch and a channel dim.
Strategies batch(const OpCall& call, int64_t spatial) {
  if (call.operands[0].ndim() != spatial + 2) {
    return {};
  }
  return {sharded(call, DimVector(call.operands.size(), 0), DimVector(call.outputs.size(), 0))};
}

/// (self, output_size): the leading dims of self, then output_size.
std::vector<TensorMeta> resized_metas(const OpCall& call) {
  auto sizes = call.operands[0].meta.sizes;
  const auto spatial = call.args[1].toIntVector();
  const auto leading = sizes.size() - std::min(sizes.size(), spatial.size());
  TESSERA_CHECK(ValueError, leading == 1 || leading == 2,
                "{}: {} for an output size of {} dims; before these are channels, or a batch and channels",
                toString(call.op.operator_name()), to_string(call.operands[0].meta), spatial.size());
  std::copy(spatial.begin(), spatial.end(), sizes.end() - std::ssize(spatial));
  return {TensorMeta::contiguous(sizes, call.operands[0].meta.dtype)};
}

OpRule leading_dims_rule(int64_t spatial) {
  return {.strategies = [spatial](const OpCall& call) { return leading_dims(call, spatial); }};
}

void register_resampling_backward(const char* names, int64_t spatial) {
  auto rule = leading_dims_rule(spatial);
  rule.local_call = with_local_sizes(2);
  register_op_rule(aten_ops(names), rule);
}

void register_adaptive_average(const std::string& name, int64_t spatial) {
  auto rule = leading_dims_rule(spatial);
  rule.output_metas = resized_metas;
  register_op_rule({name}, rule);
  rule.output_metas = like_operand(1);
  register_op_rule({name + "_backward"}, rule);
}

const RegisterOpRules rules([] {
  register_op_rule(aten_ops(kImages1d), leading_dims_rule(1));
  register_op_rule(aten_ops(kImages2d), leading_dims_rule(2));
  register_op_rule(aten_ops(kImages3d), leading_dims_rule(3));
  register_resampling_backward(kResamplingBackward1d, 1);
  register_resampling_backward(kResamplingBackward2d, 2);
  register_resampling_backward(kResamplingBackward3d, 3);
  register_adaptive_average("aten::_adaptive_avg_pool2d", 2);
  register_adaptive_average("aten::_adaptive_avg_pool3d", 3);
  register_op_rule({"aten::grid_sampler_2d", "aten::grid_sampler_2d_backward", "aten::im2col"},
                   {.strategies = [](const OpCall& call) { return batch(call, 2); }});
  register_op_rule({"aten::grid_sampler_3d", "aten::grid_sampler_3d_backward"},
                   {.strategies = [](const OpCall& call) { return batch(call, 3); }});
});

}  // namespace

}  // namespace tessera
