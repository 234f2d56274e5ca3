#include "parallel/rank_records.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "base/error.h"
#include "comm/collectives.h"

namespace tessera {

namespace {

constexpr int64_t kMaxDims = 30;

}  // namespace

Record tensor_record(const at::Tensor& tensor, const std::string& where) {
  TESSERA_CHECK(NotImplementedError, tensor.dim() <= kMaxDims, "{}: a tensor of {} dims; at most {}", where,
                tensor.dim(), kMaxDims);
  Record record(kRecordSizes + kMaxDims, 0);
  record[0] = tensor.dim();
  record[1] = static_cast<int64_t>(tensor.scalar_type());
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), record.begin() + kRecordSizes);
  return record;
}

Record row_record(const at::Tensor& tensor, const std::string& where) {
  auto record = tensor_record(tensor, where);
  record[kRecordSizes] = 0;
  return record;
}

std::vector<Record> gather_records(const Record& own, const DeviceMesh& mesh) {
  const auto length = static_cast<int64_t>(own.size());
  const auto sent = at::tensor(own, at::kLong).to(at::Device(mesh.device_type()));
  const auto received = at::empty({mesh.size() * length}, sent.options());
  all_gather(received, sent, mesh.group());
  const auto host = received.to(at::kCPU);
  std::vector<Record> records;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const auto* first = host.const_data_ptr<int64_t>() + rank * length;
    records.emplace_back(first, first + length);
  }
  return records;
}

}  // namespace tessera
