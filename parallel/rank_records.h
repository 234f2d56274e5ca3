#pragma once
// Integers that the ranks tell each other before they send tensors, so that what does not fit is an error on all of
// them rather than a hang or garbage.
//
//   const auto records = gather_records(tensor_record(tensor, "here"), mesh);     // records[rank]
//
// Thread safety: tensor_record is a pure function; gather_records is a collective, one thread a rank.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_mesh/device_mesh.h"

namespace tessera {

using Record = std::vector<int64_t>;

/// Where a tensor's sizes begin in its record.
constexpr size_t kRecordSizes = 2;

/// Number of dims, dtype, sizes, padded with zeros to a length that all ranks know. Throws NotImplementedError that
/// names `where` for more dims than have room, 30.
Record tensor_record(const at::Tensor& tensor, const std::string& where);

/// The record of any number of rows of the tensor, one of at least one dim: its first size is 0.
Record row_record(const at::Tensor& tensor, const std::string& where);

/// Every rank's `own`, equally long on all ranks of `mesh` (1-D). One all-gather, which the host waits for.
std::vector<Record> gather_records(const Record& own, const DeviceMesh& mesh);

}  // namespace tessera
