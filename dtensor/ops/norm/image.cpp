// Pooling, padding and resampling, which work within the last one, two or three dims, so batch and channels may be
// sharded.

#include <ATen/native/Pool.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "dtensor/ops/rule_helpers.h"
#include "dtensor/propagation/op_names.h"

namespace tessera {

namespace {

constexpr const char* kImages1d = R"(
    reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward upsample_nearest1d
    _upsample_nearest_exact1d upsample_linear1d)";

constexpr const char* kImages2d = R"(
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward replication_pad2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa)";

constexpr const char* kImages3d = R"(
    avg_pool3d avg_pool3d_backward adaptive_max_pool3d adaptive_max_pool3d_backward reflection_pad3d
    reflection_pad3d_backward replication_pad3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d)";

// (grad, output_size, input_size, ...)
constexpr const char* kResamplingBackward1d = R"(
    upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward)";
constexpr const char* kResamplingBackward2d = R"(
    upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward
    _upsample_bilinear2d_aa_backward upsample_bicubic2d_backward _upsample_bicubic2d_aa_backward)";
constexpr const char* kResamplingBackward3d = R"(
    upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward)";

/// Shards all dims except the last `spatial`.
Strategies leading_dims(const OpCall& call, int64_t spatial) {
  DimVector touched;
  for (int64_t dim = 1; dim <= spatial; ++dim) {
    touched.push_back(call.operands[0].ndim() - dim);
  }
  return along_dims(call, touched);
}

/// Shards only the batch, dim 0 of all tensors.
Strategies batch(const OpCall& call) {
  return {sharded(call, DimVector(call.operands.size(), 0), DimVector(call.outputs.size(), 0))};
}

/// For im2col and col2im, which also accept one image without a batch.
template <int64_t ndim>
Strategies batch_if_any(const OpCall& call) {
  return call.operands[0].ndim() == ndim ? batch(call) : Strategies();
}

/// Returns the meta for (self, output_size): the leading dims of self, then output_size.
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

/// Returns `self` with other last dims, for ops without a meta kernel.
std::vector<TensorMeta> with_spatial(const OpCall& call, at::IntArrayRef spatial) {
  const auto& self = call.operands[0].meta;
  auto sizes = self.sizes;
  TESSERA_CHECK(ValueError,
                sizes.size() > spatial.size() && std::ranges::all_of(spatial, [](int64_t n) { return n > 0; }),
                "{}: {} would become [..., {}]; pass a batch and channels, or channels, and enough for a window",
                toString(call.op.operator_name()), to_string(self), fmt::join(spatial, ", "));
  std::copy(spatial.begin(), spatial.end(), sizes.end() - std::ssize(spatial));
  return {TensorMeta::contiguous(sizes, self.dtype)};
}

/// reflection_pad2d(self, padding): padding lists (before, after) from the last dim to the first.
std::vector<TensorMeta> padded_metas(const OpCall& call) {
  const auto padding = call.args[1].toIntVector();
  const auto& sizes = call.operands[0].meta.sizes;
  DimVector spatial;
  for (size_t i = padding.size() / 2; i-- > 0 && sizes.size() > i;) {
    spatial.push_back(sizes[sizes.size() - 1 - i] + padding[2 * i] + padding[2 * i + 1]);
  }
  return with_spatial(call, spatial);
}

/// max_unpool2d(self, indices, output_size), and in three dims.
std::vector<TensorMeta> unpooled_metas(const OpCall& call) {
  return with_spatial(call, call.args[2].toIntVector());
}

/// max_pool3d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode).
std::vector<TensorMeta> max_pool3d_metas(const OpCall& call) {
  const auto& sizes = call.operands[0].meta.sizes;
  DimVector spatial;
  for (size_t i = 0; i < 3 && sizes.size() > 3; ++i) {
    const int64_t kernel = spatial_entry(call.args[1], i, 1), stride = spatial_entry(call.args[2], i, kernel);
    spatial.push_back(at::native::pooling_output_shape<int64_t>(
        sizes[sizes.size() - 3 + i], kernel, spatial_entry(call.args[3], i, 0), stride,
        spatial_entry(call.args[4], i, 1), call.args[5].toBool()));
  }
  auto metas = with_spatial(call, spatial);
  metas.push_back(TensorMeta::contiguous(metas[0].sizes, at::kLong));
  return metas;
}

/// grid_sampler(input [N, C, ...], grid [N, ..., spatial], ...).
void check_grid(const OpCall& call, const TensorMeta& input, const TensorMeta& grid) {
  const auto spatial = std::ssize(input.sizes) - 2;
  TESSERA_CHECK(ValueError,
                spatial > 0 && std::ssize(grid.sizes) == spatial + 2 && grid.sizes[0] == input.sizes[0] &&
                    grid.sizes.back() == spatial && grid.dtype == input.dtype,
                "{}: input {} and grid {}; they need one dtype and as many items, and the grid {} coordinates in its "
                "last dim",
                toString(call.op.operator_name()), to_string(input), to_string(grid), spatial);
}

std::vector<TensorMeta> grid_sampler_metas(const OpCall& call) {
  const auto &input = call.operands[0].meta, &grid = call.operands[1].meta;
  check_grid(call, input, grid);
  DimVector sizes{input.sizes[0], input.sizes[1]};
  sizes.insert(sizes.end(), grid.sizes.begin() + 1, grid.sizes.end() - 1);
  return {TensorMeta::contiguous(sizes, input.dtype)};
}

/// grid_sampler_backward(grad_output, input, grid, ..., output_mask). The grid's gradient is always computed.
std::vector<TensorMeta> grid_sampler_backward_metas(const OpCall& call) {
  const auto &input = call.operands[1].meta, &grid = call.operands[2].meta;
  check_grid(call, input, grid);
  std::vector<TensorMeta> metas;
  if (call.args.back().toBoolList().get(0)) {
    metas.push_back(TensorMeta::contiguous(input.sizes, input.dtype));
  }
  metas.push_back(TensorMeta::contiguous(grid.sizes, grid.dtype));
  return metas;
}

/// im2col(self, kernel_size, dilation, padding, stride): one column per window.
std::vector<TensorMeta> columns_metas(const OpCall& call) {
  const auto& self = call.operands[0].meta;
  const size_t ndim = self.sizes.size();
  TESSERA_CHECK(ValueError, ndim == 3 || ndim == 4, "aten::im2col: {}; pass [N, C, H, W] or [C, H, W]",
                to_string(self));
  int64_t rows = self.sizes[ndim - 3], columns = 1;
  for (size_t i = 0; i < 2; ++i) {
    const int64_t kernel = spatial_entry(call.args[1], i, 1), dilation = spatial_entry(call.args[2], i, 1);
    const int64_t room = self.sizes[ndim - 2 + i] + 2 * spatial_entry(call.args[3], i, 0) - dilation * (kernel - 1) - 1;
    const int64_t stride = spatial_entry(call.args[4], i, 1);
    TESSERA_CHECK(ValueError, kernel > 0 && dilation > 0 && stride > 0 && room >= 0,
                  "aten::im2col: {} has no window of kernel {}, dilation {}, stride {} in spatial dim {}; pad it",
                  to_string(self), kernel, dilation, stride, i);
    rows *= kernel;
    columns *= room / stride + 1;
  }
  DimVector sizes(self.sizes.begin(), self.sizes.end() - 3);
  sizes.append({rows, columns});
  return {TensorMeta::contiguous(sizes, self.dtype)};
}

/// col2im(self [N, C * window, L], output_size, kernel_size, ...): the sum of overlapping windows.
std::vector<TensorMeta> images_metas(const OpCall& call) {
  const auto& self = call.operands[0].meta;
  const size_t ndim = self.sizes.size();
  const int64_t window = spatial_entry(call.args[2], 0, 1) * spatial_entry(call.args[2], 1, 1);
  TESSERA_CHECK(ValueError, (ndim == 2 || ndim == 3) && window > 0 && self.sizes[ndim - 2] % window == 0,
                "aten::col2im: {} of windows of {} elements; pass [N, C * window, L] or [C * window, L]",
                to_string(self), window);
  DimVector sizes(self.sizes.begin(), self.sizes.end() - 2);
  sizes.append({self.sizes[ndim - 2] / window, spatial_entry(call.args[1], 0, 1), spatial_entry(call.args[1], 1, 1)});
  return {TensorMeta::contiguous(sizes, self.dtype)};
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

const RegisterOpRules image_rules([] {
  const auto rule = [](int64_t spatial, OutputMetas metas) {
    auto made = leading_dims_rule(spatial);
    made.output_metas = std::move(metas);
    return made;
  };
  register_op_rule({"aten::reflection_pad2d"}, rule(2, padded_metas));
  register_op_rule({"aten::reflection_pad2d_backward", "aten::replication_pad2d_backward"}, rule(2, like_operand(1)));
  register_op_rule({"aten::replication_pad3d_backward", "aten::max_pool3d_with_indices_backward"},
                   rule(3, like_operand(1)));
  register_op_rule({"aten::max_pool3d_with_indices"}, rule(3, max_pool3d_metas));
  register_op_rule({"aten::max_unpool2d"}, rule(2, unpooled_metas));
  register_op_rule({"aten::max_unpool3d"}, rule(3, unpooled_metas));
  register_op_rule(aten_ops(kImages1d), leading_dims_rule(1));
  register_op_rule(aten_ops(kImages2d), leading_dims_rule(2));
  register_op_rule(aten_ops(kImages3d), leading_dims_rule(3));
  register_resampling_backward(kResamplingBackward1d, 1);
  register_resampling_backward(kResamplingBackward2d, 2);
  register_resampling_backward(kResamplingBackward3d, 3);
  register_adaptive_average("aten::_adaptive_avg_pool2d", 2);
  register_adaptive_average("aten::_adaptive_avg_pool3d", 3);
  register_op_rule({"aten::grid_sampler_2d", "aten::grid_sampler_3d"},
                   {.strategies = batch, .output_metas = grid_sampler_metas});
  register_op_rule({"aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"},
                   {.strategies = batch, .output_metas = grid_sampler_backward_metas});
  register_op_rule({"aten::im2col"}, {.strategies = batch_if_any<4>, .output_metas = columns_metas});
  register_op_rule({"aten::col2im"}, {.strategies = batch_if_any<3>, .output_metas = images_metas});
});

}  // namespace

}  // namespace tessera
