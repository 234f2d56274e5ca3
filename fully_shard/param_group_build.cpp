// What a ParamGroup is made of: layouts, dtypes, devices and memory. Its steps are in param_group.cpp.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "base/error.h"
#include "comm/shared_memory.h"
#include "fully_shard/gradient_memory.h"
#include "fully_shard/param_group.h"
#include "fully_shard/stacked_spec.h"
#include "fully_shard/tensor_memory.h"

namespace tessera {

namespace {

/// Where parameters begin in memory: on a cache line, or as a GPU's matrix products like it best (cuBLAS asks how its
/// operands are aligned, and libtorch's allocator gives no less).
size_t alignment_on(at::Device device) {
  return device.is_cpu() ? 64 : 256;
}

std::vector<int64_t> dims_of(const std::vector<NamedParam>& params) {
  std::vector<int64_t> dims;
  dims.reserve(params.size());
  for (const auto& param : params) {
    dims.push_back(param.shard_dim);
  }
  return dims;
}

ParamLayout layout_of(const std::vector<NamedParam>& params, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> shapes;
  shapes.reserve(params.size());
  for (const auto& param : params) {
    shapes.push_back(param.unsharded_sizes().vec());
  }
  return make_param_layout(shapes, num_ranks, dims_of(params));
}

SpecPtr sharded_spec(const NamedParam& param, const DataParallelAxes& axes) {
  const auto placements = axes.placements(param.shard_dim);
  if (param.tp_spec) {
    return stacked_spec(axes.mesh, placements, *param.tp_spec);
  }
  return DTensorSpec::make(axes.mesh, placements,
                           TensorMeta::contiguous(param.tensor.sizes(), param.tensor.scalar_type()));
}

/// Parameters on the meta device, and on the CPU with offloading, will compute on the thread's present device.
at::Device compute_device(const at::Tensor& param, const DeviceMesh& mesh) {
  if (param.device().type() == mesh.device_type() || mesh.device_type() == at::kCPU) {
    return mesh.device_type() == at::kCPU ? at::Device(at::kCPU) : param.device();
  }
  return c10::impl::getDeviceGuardImpl(mesh.device_type())->getDevice();
}

UnitGather::Options gather_options(const std::vector<NamedParam>& params, const ParamGroup::Options& options,
                                   at::Device device) {
  std::vector<at::ScalarType> dtypes;
  std::vector<GatherItem> items;
  items.reserve(params.size());
  for (const auto& param : params) {
    dtypes.push_back(param.tensor.scalar_type());
    items.push_back(param.gather);
  }
  const int64_t smaller = options.smaller_ranks;
  return {.axes = options.axes,
          .layout = layout_of(params, options.axes.num_shards()),
          .shard_dtypes = std::move(dtypes),
          .items = std::move(items),
          .device = device,
          .smaller_ranks = smaller,
          .smaller_layout = smaller > 0 ? layout_of(params, smaller) : ParamLayout{}};
}

/// Whether shards and their gradients are in page-locked memory.
bool pins_shards(const ParamGroup::Options& options, at::Device compute_device) {
  return options.offload && options.offload->pin_memory && compute_device.is_cuda();
}

/// Whether one rank has all, where and as it is computed with.
bool is_alias(const std::vector<NamedParam>& params, const ParamGroup::Options& options, at::Device compute_device) {
  return options.axes.num_shards() == 1 && (!options.offload || compute_device.is_cpu()) &&
         std::ranges::all_of(params, [](const auto& param) {
           return param.gather.dtype == param.tensor.scalar_type() && !param.gather.extension;
         });
}

}  // namespace

ParamGroup::ParamGroup(const std::vector<NamedParam>& params, Options options)
    : options_(std::move(options)),
      layout_(layout_of(params, options_.axes.num_shards())),
      compute_device_(compute_device(params.at(0).tensor, options_.axes.mesh)),
      is_alias_(is_alias(params, options_, compute_device_)),
      gather_(gather_options(params, options_, compute_device_)),
      gradients_(reduction_options(params)),
      pool_(std::make_shared<BlockPool>(compute_device_)) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& axes = options_.axes;
  flat_shard_ = new_flat_shard(params[0].tensor.is_meta());
  params_.reserve(params.size());
  size_t offset = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& param = params[i];
    const auto dtype = param.gather.dtype;
    params_.emplace_back(
        param.tensor, layout_.slots[i], gather_.shards().chunk(flat_shard_, i),
        ShardedParam::Options{.spec = sharded_spec(param, axes),
                              .unsharded_spec = param.tp_spec ? param.tp_spec->with_dtype(dtype) : nullptr,
                              .compute_dtype = dtype,
                              .compute_device = compute_device_,
                              .origin = param.origin,
                              .rank = axes.shard_rank(),
                              .num_ranks = layout_.num_ranks,
                              .dim = param.shard_dim,
                              .is_alias = is_alias_});
    memory_offsets_.push_back(offset);
    const size_t alignment = alignment_on(compute_device_);
    offset += (params_.back().unsharded_size() + alignment - 1) / alignment * alignment;
  }
  memory_offsets_.push_back(offset);
}

GradientReduction::Options ParamGroup::reduction_options(const std::vector<NamedParam>& params) const {
  return {.api = options_.api,
          .axes = options_.axes,
          .reduce_dtype = options_.policy.reduce_dtype,
          .device = compute_device_,
          .grad_options = at::TensorOptions(shard_device()).pinned_memory(pins_shards(options_, compute_device_)),
          .dims = dims_of(params)};
}

at::ScalarType ParamGroup::reduce_dtype(const ShardedParam& param) const {
  return options_.policy.reduce_dtype.value_or(param.dtype());
}

/// Of each parameter, as it is reduced.
std::vector<int64_t> ParamGroup::gradient_bytes() const {
  std::vector<int64_t> bytes;
  for (const auto& param : params_) {
    bytes.push_back(param.slot().numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype(param))));
  }
  return bytes;
}

/// fully_shard saw that they are of one dtype; others may be trained since.
void ParamGroup::check_trained_dtypes() const {
  const ShardedParam* first = nullptr;
  for (const auto& param : params_) {
    if (!param.requires_grad()) {
      continue;
    }
    first = first ? first : &param;
    TESSERA_CHECK(
        StateError, param.dtype() == first->dtype(),
        "{0}: parameters of {1} that are trained need one dtype, but since then one of '{2}' in {3} and '{4}' in "
        "{5} was set to require a gradient; freeze one, or convert one before {0}",
        options_.api, param.origin().module, first->origin().name, c10::toString(first->dtype()), param.origin().name,
        c10::toString(param.dtype()));
  }
}

/// Gradients on a tensor-parallel mesh may need collectives of their own, which are not for any time in backward.
void ParamGroup::set_alone(bool is_alone) {
  const bool is_plain =
      std::ranges::none_of(params_, [](const ShardedParam& param) { return param.is_tensor_parallel(); });
  const bool has_parts = is_alone && is_plain && options_.bucket_bytes > 0 && layout_.num_ranks == 1;
  gradients_.cut(has_parts ? cut_by_bytes(gradient_bytes(), options_.bucket_bytes) : std::vector{params_.size()});
}

int64_t ParamGroup::version() const {
  int64_t sum = 0;
  for (const auto& param : params_) {
    sum += param.version();
  }
  return sum;
}

bool ParamGroup::lends_memory_to(const at::Tensor& tensor) const {
  const auto* memory = memory_of(tensor);
  return memory && std::ranges::any_of(
                       params_, [&](const ShardedParam& param) { return memory_of(param.unsharded()) == memory; });
}

at::Tensor ParamGroup::new_flat_shard(bool on_meta) {
  const auto device = on_meta ? at::Device(at::kMeta) : shard_device();
  const bool pins = !on_meta && pins_shards(options_, compute_device_);
  if (device.is_cpu() && !pins) {
    const auto shard = gather_.new_flat_shard();
    if (shared_place(shard)) {
      GradientMemory::prepare();
    }
    return shard;
  }
  const auto& shards = gather_.shards();
  return at::zeros({shards.numel()}, at::TensorOptions(device).dtype(shards.dtype()).pinned_memory(pins));
}

void ParamGroup::materialize() {
  TESSERA_ASSERT(is_on_meta() && state_ == UnitState::Sharded, "{} has memory", params_.at(0).origin().module);
  const at::AutoDispatchBelowADInplaceOrView below;
  flat_shard_ = new_flat_shard(/*on_meta=*/false);
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].move_to(gather_.shards().chunk(flat_shard_, i));
  }
  stamped_ = GatherFault::None;
  write_stamp(flat_shard_, unit_, stamped_);
}

/// The shards lie there where the group's ranks read each other's memory.
void ParamGroup::add_lent_gradients(std::vector<size_t>& bytes) const {
  if (!shared_place(flat_shard_)) {
    return;
  }
  for (const auto& param : params_) {
    if (param.requires_grad() && param.unsharded().scalar_type() == reduce_dtype(param)) {
      bytes.push_back(param.unsharded_size());
    }
  }
}

}  // namespace tessera
