#include "comm/backend/backend_checks.h"

#include <fmt/ranges.h>

#include <numeric>

#include "base/cast.h"
#include "base/error.h"
#include "comm/backend/local_reduce.h"

namespace tessera {

ReduceOp reduce_op_from_c10d(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::Sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::Avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::Product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::Min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::Max;
    default:
      throw NotImplementedError(fmt::format("c10d reduction number {}: only SUM, AVG, PRODUCT, MIN and MAX are there",
                                            static_cast<int>(op.op_)));
  }
}

c10d::ReduceOp::RedOpType reduce_op_to_c10d(ReduceOp op) {
  constexpr c10d::ReduceOp::RedOpType types[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MIN,
                                                 c10d::ReduceOp::MAX, c10d::ReduceOp::PRODUCT};
  return types[static_cast<size_t>(op)];
}

void check_dense_tensor(std::string_view place, const at::Tensor& tensor) {
  TESSERA_CHECK(ValueError, tensor.defined(), "{}: the tensor is undefined", place);
  TESSERA_CHECK(ValueError, tensor.layout() == c10::kStrided && tensor.is_contiguous(),
                "{}: a tensor of sizes [{}] is not dense and contiguous; pass tensor.contiguous()", place,
                fmt::join(tensor.sizes(), ", "));
}

void check_cpu_tensor(std::string_view place, const at::Tensor& tensor) {
  check_dense_tensor(place, tensor);
  TESSERA_CHECK(ValueError, tensor.device().is_cpu(), "{}: a tensor on {}; this group's backend is for cpu tensors",
                place, tensor.device().str());
}

at::Tensor flat_elements(const at::Tensor& tensor, int64_t begin, int64_t count) {
  return flat_elements(tensor).narrow(0, begin, count);
}

at::Tensor flat_elements(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1});
}

at::Tensor flat_bytes(const at::Tensor& tensor) {
  return flat_elements(tensor).view(at::kByte);
}

void check_all_gather(const at::Tensor& output, const at::Tensor& input, int group_size) {
  TESSERA_CHECK(ValueError, output.numel() == group_size * input.numel() && output.scalar_type() == input.scalar_type(),
                "all_gather: {}[{}] from each of {} ranks into {}[{}]; {}[{}] is needed",
                c10::toString(input.scalar_type()), input.numel(), group_size, c10::toString(output.scalar_type()),
                output.numel(), c10::toString(input.scalar_type()), group_size * input.numel());
}

void check_reduce_scatter(const at::Tensor& output, const at::Tensor& input, int group_size) {
  TESSERA_CHECK(ValueError, input.numel() == group_size * output.numel() && output.scalar_type() == input.scalar_type(),
                "reduce_scatter: {}[{}] into {}[{}] for each of {} ranks; {}[{}] is needed",
                c10::toString(input.scalar_type()), input.numel(), c10::toString(output.scalar_type()), output.numel(),
                group_size, c10::toString(output.scalar_type()), group_size * output.numel());
}

ReduceOp check_reduce_scatter(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                              int group_size) {
  const ReduceOp own = reduce_op_from_c10d(op);
  check_reducible("reduce_scatter", input.scalar_type(), own);
  check_reduce_scatter(output, input, group_size);
  return own;
}

ReduceOp check_all_reduce(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const ReduceOp own = reduce_op_from_c10d(op);
  check_reducible("all_reduce", tensor.scalar_type(), own);
  return own;
}

int check_broadcast(const c10d::BroadcastOptions& options, int group_size) {
  TESSERA_CHECK(ValueError, options.rootRank >= 0 && options.rootRank < group_size,
                "broadcast: source {}; the group has ranks 0 to {}", options.rootRank, group_size - 1);
  return static_cast<int>(options.rootRank);
}

const at::Tensor& only_tensor(std::string_view place, const std::vector<at::Tensor>& tensors) {
  TESSERA_CHECK(ValueError, tensors.size() == 1, "{}: {} tensors; exactly one is allowed", place, tensors.size());
  return tensors[0];
}

const at::Tensor& only_cpu_tensor(std::string_view place, const std::vector<at::Tensor>& tensors) {
  const at::Tensor& tensor = only_tensor(place, tensors);
  check_cpu_tensor(place, tensor);
  return tensor;
}

std::vector<int64_t> element_splits(std::string_view place, const at::Tensor& tensor,
                                    const std::vector<int64_t>& row_splits, int group_size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (row_splits.empty()) {
    TESSERA_CHECK(ValueError, rows % group_size == 0, "{}: {} rows cannot be cut into {} equal parts; pass splits",
                  place, rows, group_size);
    return std::vector<int64_t>(group_size, tensor.numel() / group_size);
  }
  const bool negative = std::any_of(row_splits.begin(), row_splits.end(), [](int64_t rows) { return rows < 0; });
  TESSERA_CHECK(ValueError, row_splits.size() == static_cast<size_t>(group_size) && !negative,
                "{}: splits [{}]; one number of rows, 0 or more, for each of {} ranks is needed", place,
                fmt::join(row_splits, ", "), group_size);
  const int64_t total = std::accumulate(row_splits.begin(), row_splits.end(), int64_t{0});
  TESSERA_CHECK(ValueError, total == rows, "{}: splits [{}] add up to {}, but the tensor has {} rows", place,
                fmt::join(row_splits, ", "), total, rows);
  std::vector<int64_t> elements = row_splits;
  for (int64_t& count : elements) {
    count *= rows == 0 ? 0 : tensor.numel() / rows;
  }
  return elements;
}

AllToAllSplits check_all_to_all(const at::Tensor& output, const at::Tensor& input,
                                const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits,
                                int rank, int group_size) {
  TESSERA_CHECK(ValueError, output.scalar_type() == input.scalar_type(), "all_to_all: input {} and output {} differ",
                c10::toString(input.scalar_type()), c10::toString(output.scalar_type()));
  AllToAllSplits splits{.sends = element_splits("all_to_all input", input, input_splits, group_size),
                        .receives = element_splits("all_to_all output", output, output_splits, group_size)};
  TESSERA_CHECK(ValueError, splits.sends[rank] == splits.receives[rank],
                "all_to_all: rank {} sends {} elements to itself, but expects {}", rank, splits.sends[rank],
                splits.receives[rank]);
  return splits;
}

namespace {

/// Checks segments, whose tensors must have `dtype`.
void check_segments_with_dtype(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                               at::ScalarType dtype, int group_size) {
  int64_t end = 0;
  for (const auto& [offset, numel, tensor] : parts) {
    TESSERA_CHECK(ValueError, numel >= 0 && offset >= end && offset + numel <= flat.numel(),
                  "{}: a part of elements {} to {}; parts lie one after the other in the {} elements of a rank", place,
                  offset, offset + numel, flat.numel());
    end = offset + numel;
    if (tensor.defined()) {
      TESSERA_CHECK(ValueError,
                    tensor.is_contiguous() && tensor.device() == flat.device() && tensor.scalar_type() == dtype &&
                        tensor.numel() <= group_size * numel,
                    "{}: a part of {} elements for each of {} ranks is {}[{}] on {}; contiguous {} of at most {} "
                    "elements on {} is needed",
                    place, numel, group_size, c10::toString(tensor.scalar_type()), tensor.numel(),
                    tensor.device().str(), c10::toString(dtype), group_size * numel, flat.device().str());
    }
  }
}

}  // namespace

void check_segments(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                    int group_size) {
  check_segments_with_dtype(place, parts, flat, flat.scalar_type(), group_size);
}

void check_written_segments(std::string_view place, const std::vector<TensorSegment>& parts, const at::Tensor& flat,
                            int group_size) {
  const at::ScalarType sent = flat.scalar_type(), written = segments_dtype(parts).value_or(sent);
  check_segments_with_dtype(place, parts, flat, may_cast(sent, written) ? written : sent, group_size);
}

}  // namespace tessera
