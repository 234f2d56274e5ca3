#include "parallel/style_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/shard_math.h"

namespace tessera {

namespace {

// What a rank tells of its tensor: number of dims, dtype, sizes, padded with zeros to a length that all ranks know.
constexpr int64_t kMaxDims = 30;
constexpr int64_t kRecord = kMaxDims + 2;

using Record = std::vector<int64_t>;

std::vector<Record> gather_records(const at::Tensor& local, const DeviceMesh& mesh) {
  Record own(kRecord, 0);
  own[0] = local.dim();
  own[1] = static_cast<int64_t>(local.scalar_type());
  std::copy(local.sizes().begin(), local.sizes().end(), own.begin() + 2);
  const auto sent = at::tensor(own, at::kLong).to(local.device());
  const auto received = at::empty({mesh.size() * kRecord}, sent.options());
  all_gather(received, sent, mesh.group());
  const auto host = received.to(at::kCPU);
  std::vector<Record> records;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const auto* first = host.const_data_ptr<int64_t>() + rank * kRecord;
    records.emplace_back(first, first + kRecord);
  }
  return records;
}

at::Tensor plain_input(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& layout,
                       const StyleInputOptions& options) {
  const auto placed = normalized({layout}, tensor.dim(), 1, options.where.c_str());
  if (!placed[0].is_shard() || options.even_shards || mesh.size() == 1) {
    return from_local(tensor, mesh, placed);
  }
  const int64_t dim = placed[0].dim();
  auto shape = tensor.sizes().vec();
  if (options.sharded_size) {
    const int64_t own = chunk_range(*options.sharded_size, mesh.size(), mesh.local_rank()).length;
    TESSERA_CHECK(ValueError, tensor.size(dim) == own,
                  "{}: the plain input has sizes [{}], but this rank's part of {} in dim {}, cut over {} ranks, is {}. "
                  "Pass that part, or set input_layouts to what the input is",
                  options.where, fmt::join(tensor.sizes(), ", "), *options.sharded_size, dim, mesh.size(), own);
    shape[static_cast<size_t>(dim)] = *options.sharded_size;
  } else {
    shape = exchange_shape(tensor, mesh, dim, options.where);
  }
  return from_local(tensor, mesh, placed, {.shape = shape});
}

}  // namespace

at::Tensor style_input(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& layout,
                       const Placement& desired, const StyleInputOptions& options) {
  if (!is_dtensor(tensor)) {
    return redistribute(plain_input(tensor, mesh, layout, options), {desired});
  }
  TESSERA_CHECK(ValueError, device_mesh(tensor) == mesh,
                "{}: an input is {}, but the style works on {}. redistribute() it to that mesh, or pass its local "
                "tensor",
                options.where, dtensor_spec(tensor)->to_string(), mesh);
  return redistribute(tensor, {desired});
}

at::Tensor style_output(const at::Tensor& tensor, const Placement& layout, bool use_local_output) {
  auto placed = redistribute(tensor, {layout});
  return use_local_output ? take_local(std::move(placed)) : placed;
}

std::vector<int64_t> exchange_shape(const at::Tensor& local, const DeviceMesh& mesh, int64_t dim,
                                    const std::string& where) {
  TESSERA_CHECK(NotImplementedError, local.dim() <= kMaxDims, "{}: a tensor of {} dims; at most {}", where, local.dim(),
                kMaxDims);
  const auto records = gather_records(local, mesh);
  const auto size_of = [&](const Record& record) { return record[static_cast<size_t>(dim) + 2]; };
  int64_t total = 0;
  std::vector<int64_t> sizes;
  for (const auto& record : records) {
    sizes.push_back(size_of(record));
    total += sizes.back();
  }
  std::vector<int64_t> cut;
  bool alike = true;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    cut.push_back(chunk_range(total, mesh.size(), rank).length);
    auto record = records[static_cast<size_t>(rank)];
    record[static_cast<size_t>(dim) + 2] = size_of(records[0]);
    alike = alike && record == records[0];
  }
  TESSERA_CHECK(ValueError, alike, "{}: the ranks' plain inputs differ in dtype or in other dims than the sharded {}",
                where, dim);
  TESSERA_CHECK(ValueError, sizes == cut,
                "{}: the ranks' plain inputs have [{}] in dim {}, which is not how {} is cut: [{}]. Pass shards as "
                "torch.chunk makes them, or DTensors",
                where, fmt::join(sizes, ", "), dim, total, fmt::join(cut, ", "));
  const auto& first = records[0];
  std::vector<int64_t> shape(first.begin() + 2, first.begin() + 2 + local.dim());
  shape[static_cast<size_t>(dim)] = total;
  return shape;
}

}  // namespace tessera
