#include "comm/collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/context/rank_context.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/comm/cases/parts_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

at::Tensor floats(std::vector<float> values) {
  return at::tensor(values);
}

void expect_tensor(const at::Tensor& actual, const at::Tensor& expected,
                   const std::source_location& where = std::source_location::current()) {
  if (!actual.equal(expected)) {
    detail::expectation_failed("tensors differ", where);
  }
}

TEST_CASE("all_gather puts the inputs one after the other") {
  run_ranks(3, [](int rank) {
    const at::Tensor input = floats({10.f * rank, 10.f * rank + 1});
    at::Tensor output = at::zeros({6});
    all_gather(output, input, default_group());
    expect_tensor(output, floats({0, 1, 10, 11, 20, 21}));
    at::Tensor in_place = at::zeros({3, 2});
    in_place[rank].fill_(rank);
    all_gather(in_place, in_place[rank], default_group());
    expect_tensor(in_place, floats({0, 0, 1, 1, 2, 2}).view({3, 2}));
  });
}

TEST_CASE("reduce_scatter gives each rank its part of the sum") {
  run_ranks(3, [](int rank) {
    const at::Tensor input = at::arange(6, at::kFloat) + 100 * rank;
    at::Tensor output = at::zeros({2});
    reduce_scatter(output, input, ReduceOp::Sum, default_group());
    expect_tensor(output, floats({300.f + 6 * rank, 303.f + 6 * rank}));
    reduce_scatter(output, input, ReduceOp::Avg, default_group());
    expect_tensor(output, floats({100.f + 2 * rank, 101.f + 2 * rank}));
    reduce_scatter(output, input, ReduceOp::Max, default_group());
    expect_tensor(output, floats({200.f + 2 * rank, 201.f + 2 * rank}));
    at::Tensor shared = input.clone();
    reduce_scatter(shared.narrow(0, 2 * rank, 2), shared, ReduceOp::Min, default_group());
    expect_tensor(shared.narrow(0, 2 * rank, 2), floats({2.f * rank, 2.f * rank + 1}));
  });
}

TEST_CASE("collectives with parts give the bits of those with one tensor") {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [](int) {
      for (uint64_t seed = 0; seed < 40; ++seed) {
        testing::check_segments_against_flat(seed, /*largest=*/1 + static_cast<int64_t>(seed), at::kFloat);
        testing::check_segments_against_flat(seed, /*largest=*/9, at::kBFloat16);
      }
    });
  }
}

TensorSegments parts(std::vector<TensorSegment> list) {
  return std::make_shared<const std::vector<TensorSegment>>(std::move(list));
}

TEST_CASE("over the fake backend, parts get this rank's own data, as one tensor would") {
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = 1, .world_size = 3});
  const at::Tensor whole = at::zeros({5}), reduced = at::full({4}, 7.f);
  all_gather_segments_async(parts({{1, 2, whole}}), floats({1, 2, 3}), default_group()).wait();
  expect_tensor(whole, floats({2, 3, 2, 3, 2}));
  const at::Tensor narrow = at::zeros({5}, at::kBFloat16);
  all_gather_segments_async(parts({{1, 2, narrow}}), floats({1, 2, 3}), default_group()).wait();
  expect_tensor(narrow, whole.to(at::kBFloat16));
  reduce_scatter_segments_async(reduced, parts({{1, 2, floats({1, 2, 3})}}), ReduceOp::Sum, default_group()).wait();
  expect_tensor(reduced, floats({0, 3, 0, 0}));
  destroy_process_group();
}

TEST_CASE("parts that do not fit are refused, and so are groups that take none") {
  run_ranks(2, [](int) {
    const at::Tensor input = at::zeros({6});
    const auto refused = [&](std::vector<TensorSegment> list, const std::string& message) {
      const auto shared = parts(std::move(list));
      expect_throws<ValueError>([&] { all_gather_segments_async(shared, input, default_group()).wait(); }, message);
    };
    refused({{4, 3, at::zeros({6})}}, "a part of elements 4 to 7");
    refused({{0, 3, at::zeros({6})}, {2, 1, at::zeros({2})}}, "a part of elements 2 to 3");
    refused({{0, 3, at::zeros({7})}}, "at most 6 elements");
    refused({{0, 3, at::zeros({6}, at::kLong)}}, "Long[6] on cpu; contiguous Float");
    refused({{0, 3, at::zeros({6}, at::kHalf)}, {3, 1, at::zeros({2})}}, "Float[2] on cpu; contiguous Half");
    expect_throws<ValueError>(
        [&] {
          reduce_scatter_segments_async(at::zeros({6}), parts({{0, 3, at::zeros({6}, at::kDouble)}}), ReduceOp::Sum,
                                        default_group())
              .wait();
        },
        "Double[6] on cpu; contiguous Float");
    TESSERA_EXPECT(supports_segments(default_group(), at::kCPU));
  });
  run_ranks(1, [](int) {
    TESSERA_EXPECT(!supports_segments(default_group(), at::kCPU));
    expect_throws<NotImplementedError>(
        [] { all_gather_segments_async(parts({}), at::zeros({2}), default_group()).wait(); },
        "ask supports_segments() first");
  });
}

TEST_CASE("c10d's coalesced forms are the single ones, one after the other") {
  run_ranks(3, [](int rank) {
    const auto backend = default_group()->getBackend(at::kCPU);
    std::vector<at::Tensor> tensors = {floats({1.f * rank}), floats({2, 3})};
    backend->allreduce_coalesced(tensors)->wait();
    expect_tensor(tensors[0], floats({3}));
    expect_tensor(tensors[1], floats({6, 9}));
    std::vector<at::Tensor> inputs = {floats({1.f * rank}), floats({5, 6})};
    std::vector<at::Tensor> outputs = {at::zeros({3}), at::zeros({6})};
    backend->allgather_into_tensor_coalesced(outputs, inputs)->wait();
    expect_tensor(outputs[0], floats({0, 1, 2}));
    expect_tensor(outputs[1], floats({5, 6, 5, 6, 5, 6}));
    backend->reduce_scatter_tensor_coalesced(inputs, outputs)->wait();
    expect_tensor(inputs[0], floats({3.f * rank}));
    std::vector<at::Tensor> none;
    expect_throws<ValueError>([&] { backend->allgather_into_tensor_coalesced(outputs, none); },
                              "2 outputs and 0 inputs");
  });
}

TEST_CASE("all_reduce is the sum in the order of the ranks, on every rank") {
  for (const int world_size : {1, 2, 3, 4}) {
    run_ranks(world_size, [&](int rank) {
      at::Tensor expected = at::randn({5000}, make_generator(0));
      for (int other = 1; other < world_size; ++other) {
        expected = expected + at::randn({5000}, make_generator(other));
      }
      at::Tensor tensor = at::randn({5000}, make_generator(rank));
      all_reduce(tensor, ReduceOp::Sum, default_group());
      expect_tensor(tensor, expected);
    });
  }
}

TEST_CASE("broadcast, scatter and gather with rank 1 as the root") {
  run_ranks(3, [](int rank) {
    const ProcessGroupPtr& group = default_group();
    at::Tensor tensor = at::full({2, 2}, rank, at::kLong);
    broadcast(tensor, 1, group);
    expect_tensor(tensor, at::full({2, 2}, 1, at::kLong));

    std::vector<at::Tensor> parts;
    for (int to = 0; rank == 1 && to < 3; ++to) {
      parts.push_back(at::full({to}, 7 + to, at::kInt));
    }
    at::Tensor part = at::zeros({rank}, at::kInt);
    scatter(part, parts, 1, group);
    expect_tensor(part, at::full({rank}, 7 + rank, at::kInt));

    std::vector<at::Tensor> gathered;
    for (int from = 0; rank == 1 && from < 3; ++from) {
      gathered.push_back(at::zeros({from, 2}, at::kInt));
    }
    gather(gathered, at::full({rank, 2}, 3 + rank, at::kInt), 1, group);
    for (int from = 0; rank == 1 && from < 3; ++from) {
      expect_tensor(gathered[from], at::full({from, 2}, 3 + from, at::kInt));
    }
  });
}

TEST_CASE("all_to_all with parts of different sizes, also empty ones") {
  run_ranks(3, [](int rank) {
    // Rank r sends r + to rows to rank `to`; each row holds (r, to).
    std::vector<at::Tensor> sent, expected;
    std::vector<int64_t> sends, receives;
    for (int other = 0; other < 3; ++other) {
      sends.push_back(rank + other);
      receives.push_back(rank + other);
      sent.push_back(floats({float(rank), float(other)}).expand({rank + other, 2}));
      expected.push_back(floats({float(other), float(rank)}).expand({rank + other, 2}));
    }
    at::Tensor output = at::zeros({3 * rank + 3, 2});
    all_to_all(output, at::cat(sent), receives, sends, default_group());
    expect_tensor(output, at::cat(expected));
    at::Tensor equal = at::zeros({3});
    all_to_all(equal, at::arange(3, at::kFloat) + 10 * rank, {}, {}, default_group());
    expect_tensor(equal, floats({0.f + rank, 10.f + rank, 20.f + rank}));
  });
}

TEST_CASE("several collectives may be in flight and be waited for in any order") {
  run_ranks(3, [](int rank) {
    at::Tensor a = at::full({4}, 1.f + rank), b = at::full({4}, 10.f + rank), c = at::zeros({12});
    Pending first = all_reduce_async(a, ReduceOp::Sum, default_group());
    Pending second = all_reduce_async(b, ReduceOp::Max, default_group());
    Pending third = all_gather_async(c, at::full({4}, float(rank)), default_group());
    std::vector<Pending*> order = {&first, &second, &third};
    for (int i = 0; i < 3; ++i) {
      order[(i + rank) % 3]->wait();
    }
    first.wait();  // at once
    expect_tensor(a, at::full({4}, 6.f));
    expect_tensor(b, at::full({4}, 12.f));
    expect_tensor(c, at::cat({at::full({4}, 0.f), at::full({4}, 1.f), at::full({4}, 2.f)}));
  });
}

TEST_CASE("every dtype moves, empty tensors too") {
  run_ranks(2, [](int rank) {
    for (const at::ScalarType dtype : {at::kBool, at::kByte, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                                       at::kFloat, at::kDouble, at::kComplexDouble, at::kFloat8_e4m3fn}) {
      at::Tensor output = at::zeros({2}).to(dtype);
      all_gather(output, at::full({1}, rank).to(dtype), default_group());
      expect_tensor(output.to(at::kDouble), at::arange(2, at::kDouble));
    }
    at::Tensor empty = at::empty({0});
    all_gather(empty, empty, default_group());
    all_reduce(empty, ReduceOp::Sum, default_group());
  });
}

TEST_CASE("one rank: outputs are copies and nothing is counted") {
  run_ranks(1, [](int) {
    const ProcessGroupPtr& group = default_group();
    reset_comm_stats();
    at::Tensor input = floats({1, 2}), output = at::zeros({2});
    all_gather(output, input, group);
    expect_tensor(output, input);
    output.zero_();
    reduce_scatter(output, input, ReduceOp::Avg, group);
    expect_tensor(output, input);
    output.zero_();
    all_to_all(output, input, {}, {}, group);
    expect_tensor(output, input);
    output.zero_();
    scatter(output, {input}, 0, group);
    expect_tensor(output, input);
    output.zero_();
    gather({output}, input, 0, group);
    expect_tensor(output, input);
    broadcast(output, 0, group);
    all_reduce(output, ReduceOp::Product, group);
    barrier(group);
    expect_tensor(output, input);
    expect_equal(comm_stats().calls(), 0);
  });
}

TEST_CASE("lists of scatter and gather that do not fit are an error on every rank") {
  run_ranks(3, [](int rank) {
    const ProcessGroupPtr& group = default_group();
    const at::Tensor own = at::zeros({2});
    const std::vector<at::Tensor> too_few{own, own}, doubles(3, at::zeros({2}, at::kDouble));
    const std::string elsewhere = "the tensors that rank 1 gave do not fit";
    expect_throws<ValueError>([&] { scatter(own, too_few, 1, group); },
                              rank == 1 ? "scatter: 2 tensors; one for each of 3 ranks" : "scatter: " + elsewhere);
    expect_throws<ValueError>([&] { gather(doubles, own, 1, group); },
                              rank == 1 ? "gather: every tensor must have dtype Float" : "gather: " + elsewhere);
    barrier(group);
  });
}

TEST_CASE("tensors that do not fit are refused before anything is sent") {
  run_ranks(2, [](int) {
    const ProcessGroupPtr& group = default_group();
    const at::Tensor two = at::zeros({2}), four = at::zeros({4});
    expect_throws<ValueError>([&] { all_gather(two, two, group); },
                              "input has 2 elements and output 2; 2 ranks make 4");
    expect_throws<ValueError>([&] { reduce_scatter(four, two, ReduceOp::Sum, group); }, "reduce_scatter: input has 2");
    expect_throws<ValueError>([&] { all_gather(four, two.to(at::kInt), group); }, "input Int and output Float");
    expect_throws<ValueError>([&] { all_reduce(at::zeros({2, 3}).t(), ReduceOp::Sum, group); }, "[3, 2] is not dense");
    expect_throws<ValueError>([&] { all_reduce(at::_neg_view(two), ReduceOp::Sum, group); }, "negated lazily");
    const at::Tensor freed = at::zeros({3}), part = freed.narrow(0, 1, 1);
    freed.storage().set_nbytes(0);
    expect_throws<ValueError>([&] { all_reduce(freed, ReduceOp::Sum, group); },
                              "all_reduce: the tensor ends at byte 12 of a storage of 0");
    expect_throws<ValueError>([&] { broadcast(part, 0, group); }, "byte 8 of a storage of 0");
    expect_throws<ValueError>(
        [&] {
          gather({two, two}, at::_neg_view(two), 0, group);
        },
        "gather: the input is conjugated or negated lazily");
    expect_throws<ValueError>(
        [&] {
          scatter(at::_neg_view(two), {two, two}, 0, group);
        },
        "scatter: the output is conjugated or negated lazily");
    expect_throws<ValueError>([&] { gather({}, at::Tensor(), 0, group); }, "gather: the input is undefined");
    expect_throws<ValueError>([&] { all_reduce(at::Tensor(), ReduceOp::Sum, group); }, "the tensor is undefined");
    expect_throws<ValueError>([&] { all_reduce(two.to(at::kInt), ReduceOp::Avg, group); }, "Avg on dtype Int");
    expect_throws<ValueError>([&] { broadcast(two, 2, group); }, "source 2; the group has ranks 0 to 1");
    expect_throws<ValueError>([&] { all_to_all(two, two, {1, 1}, {1}, group); }, "splits [1]; one number of rows");
    expect_throws<ValueError>([&] { all_to_all(two, two, {1, 1}, {2, 1}, group); }, "add up to 3");
    expect_throws<ValueError>([&] { all_to_all(two, two, {1, 1}, {3, -1}, group); }, "splits [3, -1]");
    expect_throws<ValueError>([&] { all_reduce(two, ReduceOp::Sum, ProcessGroupPtr()); }, "undefined");
    expect_throws<ValueError>([&] { all_reduce(at::empty({2}, at::kMeta), ReduceOp::Sum, group); }, "meta");
    barrier(group);
  });
}

TEST_CASE("an output that overlaps its input is refused, unless one is this rank's part of the other") {
  run_ranks(2, [](int rank) {
    const ProcessGroupPtr& group = default_group();
    const auto whole = at::zeros({4}), own = whole.narrow(0, 2 * rank, 2), other = whole.narrow(0, 2 - 2 * rank, 2);
    expect_throws<ValueError>([&] { all_gather(whole, other, group); },
                              "all_gather: input and output overlap, and not");
    expect_throws<ValueError>([&] { all_gather(whole, whole.narrow(0, 1, 2), group); }, "overlap");
    expect_throws<ValueError>([&] { reduce_scatter(other, whole, ReduceOp::Sum, group); }, "overlap");
    expect_throws<ValueError>([&] { all_to_all(whole, whole, {}, {}, group); }, "overlap; clone() one of them");
    own.fill_(rank + 1);
    all_gather(whole, own, group);
    TESSERA_EXPECT(whole.equal(at::tensor({1.f, 1.f, 2.f, 2.f})));
    reduce_scatter(own, whole, ReduceOp::Sum, group);
    TESSERA_EXPECT(own.equal(at::full({2}, 2.f * static_cast<float>(rank + 1))));
  });
}

TEST_CASE("collectives leave version counters alone and work on leaves that need gradients") {
  run_ranks(2, [](int rank) {
    at::Tensor leaf = at::zeros({2}).requires_grad_(true);
    const int64_t version = leaf._version();
    all_reduce(leaf, ReduceOp::Sum, default_group());
    all_gather(leaf, leaf.detach()[rank], default_group());
    expect_equal(leaf._version(), version);
  });
}

TEST_CASE("counters: calls and bytes that a rank must send") {
  run_ranks(4, [](int rank) {
    const ProcessGroupPtr& group = default_group();
    reset_comm_stats();
    at::Tensor full = at::zeros({8}), part = at::zeros({2});
    all_gather(full, part, group);
    reduce_scatter(part, full, ReduceOp::Sum, group);
    all_reduce(full, ReduceOp::Sum, group);
    broadcast(full, 2, group);
    all_to_all(full, full.clone(), {}, {}, group);
    barrier(group);
    const CommStats stats = comm_stats();
    expect_equal(stats[Collective::AllGather].bytes_sent, 3 * 8);
    expect_equal(stats[Collective::ReduceScatter].bytes_sent, 3 * 8);
    expect_equal(stats[Collective::AllReduce].bytes_sent, 2 * 3 * 32 / 4);
    expect_equal(stats[Collective::Broadcast].bytes_sent, rank == 2 ? 3 * 32 : 0);
    expect_equal(stats[Collective::AllToAll].bytes_sent, 24);
    expect_equal(stats[Collective::Barrier].calls, 1);
    expect_equal(stats.calls(), 6);
    expect_equal(stats.bytes_sent(), 24 + 24 + 48 + 24 + (rank == 2 ? 96 : 0));
    reset_comm_stats();
    expect_equal(comm_stats().calls(), 0);
  });
}

TEST_CASE("c10d's own calls reach the backend") {
  run_ranks(2, [](int rank) {
    std::vector<at::Tensor> tensors = {at::full({2}, 1.f + rank)};
    default_group()->allreduce(tensors)->wait();
    expect_tensor(tensors[0], at::full({2}, 3.f));
    std::vector<std::vector<at::Tensor>> lists = {{at::zeros({2}), at::zeros({2})}};
    std::vector<at::Tensor> inputs = {at::full({2}, 5.f + rank)};
    default_group()->allgather(lists, inputs)->wait();
    expect_tensor(lists[0][1], at::full({2}, 6.f));
  });
}

}  // namespace
}  // namespace tessera
