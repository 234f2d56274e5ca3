#include "parallel/style_tensors.h"

#include <fmt/ranges.h>

#include "base/error.h"
#include "dtensor/local/dtensor_impl.h"
#include "dtensor/spec/shard_math.h"
#include "parallel/rank_records.h"

namespace tessera {

namespace {

/// Returns `placement` for a tensor of `ndim` dims. redistribute() would also reject an invalid one, but without naming
/// the layer.
Placements placed_for(const Placement& placement, int64_t ndim, const std::string& where) {
  return normalized({placement}, ndim, 1, where.c_str());
}

at::Tensor plain_input(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& layout,
                       const StyleInputOptions& options) {
  TESSERA_CHECK(ValueError, tensor.is_meta() || tensor.device().type() == mesh.device_type(),
                "{}: a plain {} is on {}, but the style works on {}; move it to the mesh's device first", options.where,
                options.what, tensor.device().str(), mesh);
  const auto placed = placed_for(layout, tensor.dim(), options.where);
  if (!placed[0].is_shard() || options.even_shards || mesh.size() == 1) {
    return from_local(tensor, mesh, placed);
  }
  const int64_t dim = placed[0].dim();
  auto shape = tensor.sizes().vec();
  if (options.sharded_size) {
    const int64_t own = chunk_range(*options.sharded_size, mesh.size(), mesh.local_rank()).length;
    TESSERA_CHECK(ValueError, tensor.size(dim) == own,
                  "{}: the plain {} has sizes [{}], but this rank's part of {} in dim {}, cut over {} ranks, is {}. "
                  "Pass that part, or set {}_layouts to what the {} is",
                  options.where, options.what, fmt::join(tensor.sizes(), ", "), *options.sharded_size, dim, mesh.size(),
                  own, options.what, options.what);
    shape[static_cast<size_t>(dim)] = *options.sharded_size;
  } else {
    shape = exchange_shape(tensor, mesh, dim, options);
  }
  return from_local(tensor, mesh, placed, {.shape = shape});
}

}  // namespace

at::Tensor style_input(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& layout,
                       const Placement& desired, const StyleInputOptions& options) {
  const auto placed = placed_for(desired, tensor.dim(), options.where);
  if (!is_dtensor(tensor)) {
    return redistribute(plain_input(tensor, mesh, layout, options), placed);
  }
  TESSERA_CHECK(ValueError, device_mesh(tensor) == mesh,
                "{}: an {} is {}, but the style works on {}. redistribute() it to that mesh, or pass its local tensor",
                options.where, options.what, dtensor_spec(tensor)->to_string(), mesh);
  return redistribute(tensor, placed);
}

at::Tensor style_output(const at::Tensor& tensor, const Placement& layout, const StyleOutputOptions& options) {
  TESSERA_CHECK(ValueError, is_dtensor(tensor),
                "{}: the output is a plain {}, but the style places DTensors; let forward return one", options.where,
                tensor.defined() ? to_string(TensorMeta::of(tensor)) : "undefined tensor");
  auto placed = redistribute(tensor, placed_for(layout, tensor.dim(), options.where));
  return options.use_local_output ? take_local(std::move(placed)) : placed;
}

at::Tensor moved_local(at::Tensor placed, const at::Tensor& from) {
  return !placed.is_same(from) && has_own_local_memory(placed) ? take_local(std::move(placed)) : to_local(placed);
}

std::vector<int64_t> exchange_shape(const at::Tensor& local, const DeviceMesh& mesh, int64_t dim,
                                    const StyleInputOptions& options) {
  const auto records = gather_records(tensor_record(local, options.where), mesh);
  const auto recorded_size = [&](const Record& record) { return record[kRecordSizes + static_cast<size_t>(dim)]; };
  int64_t total = 0;
  std::vector<int64_t> sizes;
  for (const auto& record : records) {
    sizes.push_back(recorded_size(record));
    total += sizes.back();
  }
  std::vector<int64_t> cut;
  bool alike = true;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    cut.push_back(chunk_range(total, mesh.size(), rank).length);
    auto record = records[static_cast<size_t>(rank)];
    record[kRecordSizes + static_cast<size_t>(dim)] = recorded_size(records[0]);
    alike = alike && record == records[0];
  }
  TESSERA_CHECK(ValueError, alike, "{}: the ranks' plain {}s differ in dtype or in other dims than the sharded {}",
                options.where, options.what, dim);
  TESSERA_CHECK(ValueError, sizes == cut,
                "{}: the ranks' plain {}s have [{}] in dim {}, which is not how {} is cut: [{}]. Pass shards as "
                "torch.chunk makes them, or DTensors",
                options.where, options.what, fmt::join(sizes, ", "), dim, total, fmt::join(cut, ", "));
  auto shape = local.sizes().vec();
  shape[static_cast<size_t>(dim)] = total;
  return shape;
}

}  // namespace tessera
