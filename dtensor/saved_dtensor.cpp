#include "dtensor/saved_dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <fmt/ranges.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Ints = std::vector<int64_t>;

// Numbers of a placement in a file: kind, dim, order and reduction.
enum SavedKind : int64_t { kReplicate = 0, kShard = 1, kPartial = 2 };
constexpr size_t kNumbers = 4;

Ints encode_placements(const Placements& placements) {
  Ints numbers;
  for (const auto& p : placements) {
    TESSERA_CHECK(ValueError, !p.is_norm_partial(), "torch::save: a pending norm is not saved; redistribute it to {}",
                  Replicate());
    const auto kind = p.is_shard() ? kShard : p.is_partial() ? kPartial : kReplicate;
    const auto reduction = p.is_partial() ? static_cast<int64_t>(p.reduce_op()) : 0;
    numbers.insert(numbers.end(), {kind, p.is_shard() ? p.dim() : 0, p.is_shard() ? p.order() : 0, reduction});
  }
  return numbers;
}

Placement decode_placement(const int64_t* numbers) {
  switch (numbers[0]) {
    case kReplicate:
      return Replicate();
    case kShard:
      return Shard(numbers[1], static_cast<int>(numbers[2]));
    default:
      TESSERA_CHECK(ValueError, numbers[0] == kPartial, "torch::load: a placement of the unknown kind {}", numbers[0]);
      TESSERA_CHECK(ValueError, numbers[3] >= 0 && numbers[3] <= static_cast<int64_t>(ReduceOp::Product),
                    "torch::load: a pending reduction of the unknown kind {}", numbers[3]);
      return Partial(static_cast<ReduceOp>(numbers[3]));
  }
}

Placements decode_placements(const Ints& numbers, size_t axes) {
  TESSERA_CHECK(ValueError, numbers.size() == kNumbers * axes,
                "torch::load: {} numbers for the placements on {} axes, which are {} each", numbers.size(), axes,
                kNumbers);
  Placements placements;
  for (size_t axis = 0; axis < axes; ++axis) {
    placements.push_back(decode_placement(numbers.data() + kNumbers * axis));
  }
  return placements;
}

c10::IValue read(InputArchive& archive, const char* key) {
  c10::IValue value;
  archive.read(key, value);
  return value;
}

Ints read_ints(InputArchive& archive, const char* key) {
  return read(archive, key).toIntVector();
}

/// Throws unless the file has this mesh and this rank.
void check_mesh(InputArchive& archive, const DeviceMesh& mesh) {
  TESSERA_CHECK(ValueError, mesh.defined(), "torch::load: SavedDTensor.mesh is empty; set it to the tensor's mesh");
  const auto shape = read_ints(archive, "mesh_shape");
  std::vector<std::string> names;
  for (const auto& name : read(archive, "mesh_axis_names").toListRef()) {
    names.push_back(name.toStringRef());
  }
  TESSERA_CHECK(ValueError, shape == mesh.shape() && names == mesh.axis_names(),
                "torch::load: the tensor was saved on a mesh of shape [{}] with the axes [{}], and is loaded on {}; "
                "load it on a like mesh, or save checkpoints, which open on any",
                fmt::join(shape, ", "), fmt::join(names, ", "), mesh);
  const auto coordinate = read_ints(archive, "coordinate");
  TESSERA_CHECK(ValueError, coordinate == mesh.coordinate(),
                "torch::load: the file is that of the rank at [{}] of {}, and this one is at [{}]",
                fmt::join(coordinate, ", "), mesh, fmt::join(mesh.coordinate(), ", "));
}

/// Returns a copy, because archives store whole storages, and a shard may be part of one that a unit's parameters
/// share.
at::Tensor without_neighbours(const at::Tensor& local) {
  return local.storage().nbytes() > local.nbytes() ? local.clone() : local;
}

}  // namespace

OutputArchive& operator<<(OutputArchive& archive, const SavedDTensor& saved) {
  const auto& spec = *dtensor_spec(saved.tensor);
  check_not_stale(*dtensor_meta(saved.tensor), "torch::save");
  const auto& mesh = spec.mesh();
  c10::List<std::string> names;
  for (const auto& name : mesh.axis_names()) {
    names.push_back(name);
  }
  archive.write("local", without_neighbours(dtensor_meta(saved.tensor)->local.detach()));
  archive.write("requires_grad", c10::IValue(saved.tensor.requires_grad()));
  archive.write("sizes", c10::IValue(spec.sizes().vec()));
  archive.write("strides", c10::IValue(spec.strides().vec()));
  archive.write("placements", c10::IValue(encode_placements(spec.placements())));
  archive.write("mesh_shape", c10::IValue(mesh.shape()));
  archive.write("mesh_axis_names", c10::IValue(std::move(names)));
  archive.write("coordinate", c10::IValue(mesh.coordinate()));
  return archive;
}

InputArchive& operator>>(InputArchive& archive, SavedDTensor& saved) {
  const at::NoGradGuard no_grad;
  check_mesh(archive, saved.mesh);
  at::Tensor local;
  archive.read("local", local);
  const auto sizes = read_ints(archive, "sizes");
  const auto strides = read_ints(archive, "strides");
  TESSERA_CHECK(ValueError, sizes.size() == strides.size(), "torch::load: {} sizes and {} strides", sizes.size(),
                strides.size());
  auto placements = decode_placements(read_ints(archive, "placements"), saved.mesh.shape().size());
  const auto spec = DTensorSpec::make(
      saved.mesh,
      normalized(std::move(placements), static_cast<int64_t>(sizes.size()), saved.mesh.ndim(), "torch::load"),
      {.sizes = DimVector(sizes.begin(), sizes.end()),
       .strides = DimVector(strides.begin(), strides.end()),
       .dtype = local.scalar_type()});
  TESSERA_CHECK(ValueError, local.sizes() == spec->local_sizes(),
                "torch::load: the file holds a part of [{}], but this rank's part of {} is [{}]",
                fmt::join(local.sizes(), ", "), spec->to_string(), fmt::join(spec->local_sizes(), ", "));
  auto tensor = wrap_local(local.detach(), spec);
  tensor.set_requires_grad(read(archive, "requires_grad").toBool());
  saved.tensor = std::move(tensor);
  return archive;
}

}  // namespace tessera
