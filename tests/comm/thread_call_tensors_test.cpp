// The calls by tensor operations give the bits of those by memcpy, on every device that there is.

#include "comm/threads/thread_call_tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <random>

#include "base/error.h"
#include "comm/backend/local_reduce.h"
#include "comm/threads/thread_call.h"
#include "testing/run_ranks.h"
#include "testing/test_devices.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Calls = std::vector<CollectiveCall>;

constexpr at::ScalarType kReducible[] = {at::kBool,  at::kByte,   at::kChar,         at::kShort,
                                         at::kInt,   at::kLong,   at::kHalf,         at::kBFloat16,
                                         at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product};

bool is_reducible(at::ScalarType dtype, ReduceOp op) {
  try {
    check_reducible("test", dtype, op);
    return true;
  } catch (const ValueError&) {
    return false;
  }
}

/// Of floating types some elements are NaN, infinite, zeros of either sign or tiny.
at::Tensor draw_tensor(int64_t numel, at::ScalarType dtype, uint64_t seed) {
  auto generator = make_generator(seed);
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) {
    return at::randint(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(), {numel}, generator,
                       at::kLong)
        .bitwise_right_shift(dtype == at::kBool ? 63 : 0)
        .to(dtype);
  }
  const bool is_complex = c10::isComplexType(dtype);
  const at::Tensor values = at::randn({is_complex ? 2 * numel : numel}, generator, at::kDouble) * 100;
  const double special[] = {std::numeric_limits<double>::quiet_NaN(),
                            std::numeric_limits<double>::infinity(),
                            -std::numeric_limits<double>::infinity(),
                            0.0,
                            -0.0,
                            1e-40};
  std::mt19937_64 numbers(seed);
  for (int64_t i = 0; i < values.numel(); ++i) {
    if (const auto k = numbers() % 24; k < std::size(special)) {
      values[i].fill_(special[k]);
    }
  }
  return is_complex ? at::view_as_complex(values.view({numel, 2})).to(dtype) : values.to(dtype);
}

/// Equal bits, and NaN where the other has NaN.
bool same_bits(at::Tensor a, at::Tensor b) {
  a = (a.is_complex() ? at::view_as_real(a) : a).cpu();
  b = (b.is_complex() ? at::view_as_real(b) : b).cpu();
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  if (a.is_floating_point() && a.element_size() > 1) {
    const at::Tensor nan = a.isnan();
    if (!nan.equal(b.isnan())) {
      return false;
    }
    a = a.masked_fill(nan, 0);
    b = b.masked_fill(nan, 0);
  }
  return a.view(-1).view(at::kByte).equal(b.view(-1).view(at::kByte));
}

/// The same calls on tensors of their own, on `device`.
Calls copies(const Calls& calls, c10::Device device) {
  Calls result = calls;
  for (CollectiveCall& call : result) {
    for (at::Tensor* tensor : {&call.input, &call.output}) {
      *tensor = tensor->defined() ? tensor->to(device, tensor->scalar_type(), false, /*copy=*/true) : *tensor;
    }
  }
  return result;
}

void check_same(const Calls& calls, c10::Device device) {
  const Calls by_memory = copies(calls, c10::kCPU), by_ops = copies(calls, device);
  execute(by_memory);
  std::vector<uint32_t> versions;
  for (const CollectiveCall& call : by_ops) {
    versions.push_back(call.output.defined() ? call.output._version() : 0);
  }
  execute_by_tensor_ops(by_ops);
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    if (calls[rank].output.defined()) {
      INFO("rank " << rank << " of " << calls.size() << ", " << describe(calls[rank]) << " on " << device);
      CHECK(same_bits(by_ops[rank].output, by_memory[rank].output));
      CHECK(by_ops[rank].output._version() == versions[rank]);
    }
  }
}

TEST_CASE("calls by tensor operations: every reduction of every dtype, in the order of the ranks") {
  for (const c10::Device device : test_devices()) {
    for (const at::ScalarType dtype : kReducible) {
      for (const ReduceOp op : kOps) {
        if (!is_reducible(dtype, op)) {
          continue;
        }
        for (const size_t ranks : {2, 3, 5}) {
          for (const int64_t count : {0, 1, 211}) {
            Calls all_reduces, reduce_scatters;
            for (size_t rank = 0; rank < ranks; ++rank) {
              all_reduces.push_back(
                  {.kind = Collective::AllReduce, .op = op, .output = draw_tensor(count, dtype, 10 * count + rank)});
              reduce_scatters.push_back(
                  {.kind = Collective::ReduceScatter,
                   .op = op,
                   .output = at::zeros({count}, dtype),
                   .input = draw_tensor(count * static_cast<int64_t>(ranks), dtype, 7 * count + rank)});
            }
            check_same(all_reduces, device);
            check_same(reduce_scatters, device);
          }
        }
      }
    }
  }
}

TEST_CASE("calls by tensor operations: copies of every dtype, of uneven and of no elements") {
  for (const c10::Device device : test_devices()) {
    for (const at::ScalarType dtype : {at::kBool, at::kShort, at::kLong, at::kBFloat16, at::kDouble, at::kComplexFloat,
                                       at::kFloat8_e4m3fn, at::kUInt16}) {
      const auto bytes = [&](int64_t numel, uint64_t seed) {
        const auto item = static_cast<int64_t>(c10::elementSize(dtype));
        auto generator = make_generator(seed);
        return at::randint(dtype == at::kBool ? 2 : 256, {numel * item}, generator, at::kByte).view(dtype);
      };
      for (const int64_t count : {0, 1, 30}) {
        Calls gathers, broadcasts, exchanges, messages;
        for (int64_t rank = 0; rank < 3; ++rank) {
          gathers.push_back(
              {.kind = Collective::AllGather, .output = bytes(3 * count, 9), .input = bytes(count, rank)});
          broadcasts.push_back({.kind = Collective::Broadcast, .root = 1, .output = bytes(count, rank)});
          // Rank r sends count * r + to elements to rank `to`.
          std::vector<int64_t> sends, receives;
          for (int64_t other = 0; other < 3; ++other) {
            sends.push_back(count * rank + other);
            receives.push_back(count * other + rank);
          }
          exchanges.push_back({.kind = Collective::AllToAll,
                               .output = bytes(3 * count + 3 * rank, 9),
                               .input = bytes(3 * count * rank + 3, rank),
                               .input_splits = sends,
                               .output_splits = receives});
        }
        messages.push_back({.kind = Collective::Send, .root = 1, .input = bytes(count, 1)});
        messages.push_back({.kind = Collective::Recv, .root = 0, .output = bytes(count, 2)});
        for (const Calls& calls : {gathers, broadcasts, exchanges, messages}) {
          check_same(calls, device);
        }
      }
    }
  }
}

TEST_CASE("calls by tensor operations: an output may be this rank's part of the input, or hold it") {
  for (const c10::Device device : test_devices()) {
    const auto numbers = [&](int64_t first) { return at::arange(first, first + 4, at::kFloat).to(device); };
    std::vector<at::Tensor> whole = {numbers(0), numbers(100)};
    Calls calls;
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto own = whole[rank].narrow(0, 2 * rank, 2);
      calls.push_back({.kind = Collective::ReduceScatter, .output = own, .input = whole[rank]});
    }
    execute_by_tensor_ops(calls);
    CHECK(whole[0].cpu().equal(at::tensor({100.f, 102.f, 2.f, 3.f})));
    CHECK(whole[1].cpu().equal(at::tensor({100.f, 101.f, 104.f, 106.f})));
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto own = whole[rank].narrow(0, 2 * rank, 2);
      calls[rank] = {.kind = Collective::AllGather, .output = whole[rank], .input = own};
    }
    execute_by_tensor_ops(calls);
    for (const at::Tensor& tensor : whole) {
      CHECK(tensor.cpu().equal(at::tensor({100.f, 102.f, 104.f, 106.f})));
    }
  }
}

TEST_CASE("calls of ranks whose tensors are on different devices do not belong together") {
  CollectiveSignature here = {.kind = Collective::AllReduce, .dtype = c10::kFloat, .output = 4}, there = here;
  CHECK(find_mismatch({here, there}).empty());
  there.device = c10::Device(c10::kCUDA, 1);
  CHECK(find_mismatch({here, there}) ==
        "the ranks called different collectives: rank 0: all_reduce(Sum, Float[4]); rank 1: all_reduce(Sum, Float[4] "
        "on cuda:1)");
  here = {.kind = Collective::Send, .root = 1, .dtype = c10::kInt, .device = there.device, .input = 4};
  there = {.kind = Collective::Recv, .root = 0, .dtype = c10::kInt, .device = there.device, .output = 4};
  CHECK(find_mismatch({here, there}).empty());
  there.device = c10::kCPU;
  CHECK(
      find_mismatch({here, there}) ==
      "what is sent is not what is received: rank 0: send(to rank 1, tag 0, Int[4] on cuda:1); rank 1: recv(from rank "
      "0, tag 0, Int[4])");
}

}  // namespace
}  // namespace tessera
