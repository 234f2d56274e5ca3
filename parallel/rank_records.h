#pragma once
// Exchanges integers before tensors are sent, so that a mismatch throws on every rank instead of hanging.
// Thread safety: gather_records is a collective for one thread per rank; the other functions are pure.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

using Record = std::vector<int64_t>;

constexpr size_t kRecordSizes = 2;  // index of the first size in a tensor's record

/// Returns the number of dims, dtype and zero-padded sizes. Throws NotImplementedError for more than 30 dims.
Record tensor_record(const at::Tensor& tensor, const std::string& where);

/// Like tensor_record, but with size 0 for dim 0, so that any number of rows has the same record.
Record row_record(const at::Tensor& tensor, const std::string& where);

/// Returns all ranks' records, which must have one length. Runs an all-gather over a 1-D mesh and blocks the host.
std::vector<Record> gather_records(const Record& own, const DeviceMesh& mesh);

}  // namespace tessera
