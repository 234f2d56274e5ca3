// What NCCL is given to reduce, on every device that there is: with reductions that drop NaN, as NCCL's do, the result
// is that of comm/backend/reduce_op.h.

#include "comm/nccl/nccl_reduction.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/fmax.h>
#include <ATen/ops/fmin.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <vector>

#include "base/error.h"
#include "comm/backend/stream_event.h"
#include "testing/test_devices.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kRanks = 3;

/// Of each rank: [6], with a NaN on no rank, on one and on all.
std::vector<at::Tensor> inputs_of_ranks(at::ScalarType dtype, c10::Device device) {
  const auto options = at::dtype(at::kDouble);
  return {at::tensor({1.0, kNaN, 3.0, kNaN, -kInf, -0.5}, options).to(device, dtype),
          at::tensor({-2.0, 5.0, kNaN, kNaN, kInf, -1.5}, options).to(device, dtype),
          at::tensor({0.5, 7.0, -3.0, kNaN, kNaN, -0.25}, options).to(device, dtype)};
}

at::Tensor reduce_as_nccl(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::Tensor result = inputs[0];
  for (size_t i = 1; i < inputs.size(); ++i) {
    result = op == ReduceOp::Max ? at::fmax(result, inputs[i]) : at::fmin(result, inputs[i]);
  }
  return result;
}

at::Tensor expected_of(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::Tensor result = inputs[0];
  for (size_t i = 1; i < inputs.size(); ++i) {
    result = op == ReduceOp::Max ? at::maximum(result, inputs[i]) : at::minimum(result, inputs[i]);
  }
  return result;
}

void check_equal(const at::Tensor& actual, const at::Tensor& expected) {
  CHECK(actual.cpu().allclose(expected.cpu(), 0, 0, /*equal_nan=*/true));
}

/// On another stream than the one that the reduction was issued on, which then gets its memory.
void finish_elsewhere(NcclReduction reduction, c10::Device device) {
  const StreamEvent reduced = StreamEvent::here(device);
  StreamEvent finished;
  {
    const OwnStream waiting(device);
    reduced.wait();
    reduction.finish();
    finished = StreamEvent::here(device);
  }
  const auto sizes = reduction.input.sizes().vec();
  const auto options = reduction.input.options();
  reduction = {};
  at::full(sizes, 3, options);
  finished.wait();
}

TEST_CASE("an all_reduce over NCCL hands NaN on in minima and maxima") {
  const auto op = GENERATE(ReduceOp::Min, ReduceOp::Max);
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16);
  for (const c10::Device device : test_devices()) {
    CAPTURE(op, dtype, device);
    const OwnStream issuing(device);
    auto tensors = inputs_of_ranks(dtype, device);
    const at::Tensor expected = expected_of(tensors, op);
    std::vector<NcclReduction> reductions;
    std::vector<at::Tensor> sent;
    for (const at::Tensor& tensor : tensors) {
      reductions.push_back(nccl_all_reduce(tensor.view({2, 3}), op));
      CHECK(reductions.back().output.is_same(reductions.back().input));
      sent.push_back(reductions.back().input.clone());
    }
    const at::Tensor result = reduce_as_nccl(sent, op);
    for (size_t rank = 0; rank < kRanks; ++rank) {
      reductions[rank].output.copy_(result);
      const auto version = tensors[rank]._version();
      finish_elsewhere(std::move(reductions[rank]), device);
      check_equal(tensors[rank], expected);
      CHECK(tensors[rank]._version() == version);
    }
  }
}

TEST_CASE("a reduce_scatter over NCCL hands NaN on in minima and maxima") {
  const auto op = GENERATE(ReduceOp::Min, ReduceOp::Max);
  for (const c10::Device device : test_devices()) {
    CAPTURE(op, device);
    const OwnStream issuing(device);
    const auto inputs = inputs_of_ranks(at::kFloat, device);
    const at::Tensor expected = expected_of(inputs, op);
    std::vector<at::Tensor> outputs, sent;
    std::vector<NcclReduction> reductions;
    for (const at::Tensor& input : inputs) {
      outputs.push_back(at::zeros({2}, input.options()));
      reductions.push_back(nccl_reduce_scatter(outputs.back(), input, op));
      sent.push_back(reductions.back().input);
    }
    const at::Tensor parts = reduce_as_nccl(sent, op).view({kRanks, -1});
    for (size_t rank = 0; rank < kRanks; ++rank) {
      const auto place = static_cast<int64_t>(rank);
      REQUIRE(reductions[rank].output.sizes() == parts[place].sizes());
      reductions[rank].output.copy_(parts[place]);
      finish_elsewhere(std::move(reductions[rank]), device);
      check_equal(outputs[rank], expected.narrow(0, 2 * place, 2));
    }
  }
}

TEST_CASE("other reductions over NCCL are of the tensors themselves, and complex numbers of pairs") {
  const at::Tensor floats = at::zeros({4}), whole = at::zeros({4}, at::kLong), none = at::zeros({0});
  for (const auto& [tensor, op] : {std::pair(floats, ReduceOp::Sum), std::pair(floats, ReduceOp::Avg),
                                   std::pair(whole, ReduceOp::Max), std::pair(none, ReduceOp::Max)}) {
    CAPTURE(op);
    const auto reduction = nccl_all_reduce(tensor, op);
    CHECK(reduction.finish == nullptr);
    CHECK(reduction.output.data_ptr() == tensor.data_ptr());
  }
  const auto complex =
      nccl_reduce_scatter(at::zeros({2}, at::kComplexFloat), at::zeros({6}, at::kComplexFloat), ReduceOp::Sum);
  CHECK(complex.output.numel() == 4);
  CHECK(complex.input.numel() == 12);
  CHECK(complex.input.scalar_type() == at::kFloat);
  CHECK_THROWS_AS(nccl_all_reduce(at::zeros({4}, at::kShort), ReduceOp::Sum), NotImplementedError);
  CHECK_THROWS_AS(nccl_all_reduce(at::zeros({4}, at::kComplexFloat), ReduceOp::Product), NotImplementedError);
}

}  // namespace
}  // namespace tessera
