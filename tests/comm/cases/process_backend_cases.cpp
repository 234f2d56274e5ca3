// Every case runs its body in processes that share nothing with this one but the program.

#include "tests/comm/cases/process_backend_cases.h"

#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <signal.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Catch::Matchers::ContainsSubstring;
using Clock = std::chrono::steady_clock;

/// Contiguous, with strides that one of a single element may have.
at::Tensor with_any_strides(const at::Tensor& tensor) {
  return tensor.numel() == 1 ? tensor.as_strided(tensor.sizes(), std::vector<int64_t>(tensor.dim(), 3)) : tensor;
}

at::Tensor random_numbers(std::vector<int64_t> sizes, at::ScalarType dtype, uint64_t seed) {
  if (at::isIntegralType(dtype, /*includeBool=*/true)) {
    return with_any_strides(at::randint(0, 2, sizes, make_generator(seed)).to(dtype));
  }
  return with_any_strides(at::randn(sizes, make_generator(seed)).to(dtype));
}

/// What this rank gets from each collective over the default group, with inputs that depend on the rank alone.
std::vector<at::Tensor> run_collectives(at::ScalarType dtype, int64_t part) {
  const ProcessGroupPtr& group = default_group();
  const int rank = get_rank(), size = get_world_size();
  std::vector<at::Tensor> results;
  const auto result = [&](std::vector<int64_t> sizes) {
    return results.emplace_back(with_any_strides(at::zeros(sizes, dtype)));
  };
  all_gather(result({size, part}), random_numbers({part}, dtype, rank), group);
  std::vector<ReduceOp> operations = {ReduceOp::Sum, ReduceOp::Product};
  if (!at::isComplexType(dtype)) {
    operations.insert(operations.end(), {ReduceOp::Min, ReduceOp::Max});
  }
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) {
    operations.push_back(ReduceOp::Avg);
  }
  for (const ReduceOp op : operations) {
    reduce_scatter(result({part}), random_numbers({size, part}, dtype, rank), op, group);
    all_reduce(results.emplace_back(random_numbers({part, 3}, dtype, 10 + rank)), op, group);
  }
  broadcast(results.emplace_back(random_numbers({part}, dtype, rank)), size - 1, group);
  std::vector<int64_t> splits;
  for (int other = 0; other < size; ++other) {
    splits.push_back(rank + other);
  }
  const int64_t rows = size * rank + size * (size - 1) / 2;
  all_to_all(result({rows, part}), random_numbers({rows, part}, dtype, 20 + rank), splits, splits, group);
  std::vector<at::Tensor> parts(rank == 0 ? size : 0, random_numbers({part}, dtype, 30));
  scatter(result({part}), parts, 0, group);
  if (rank == 0) {
    for (at::Tensor& gathered : parts) {
      gathered = result({part});
    }
  }
  gather(parts, random_numbers({part}, dtype, 40 + rank), 0, group);
  barrier(group);
  return results;
}

void expect_same_bits(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  expect_equal(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    expect_equal(actual[i].numel(), expected[i].numel());
    const bool same = actual[i].numel() == 0 ||
                      std::memcmp(actual[i].const_data_ptr(), expected[i].const_data_ptr(), actual[i].nbytes()) == 0;
    if (!same) {
      throw ExpectationError(fmt::format("result {} of dtype {} differs", i, c10::toString(actual[i].scalar_type())));
    }
  }
}

void compare_with_threads(at::ScalarType dtype, int64_t part) {
  const int rank = get_rank();
  const std::vector<at::Tensor> over_processes = run_collectives(dtype, part);
  std::vector<at::Tensor> over_threads;
  run_ranks(get_world_size(), [&](int thread_rank) {
    std::vector<at::Tensor> results = run_collectives(dtype, part);
    if (thread_rank == rank) {
      over_threads = std::move(results);
    }
  });
  expect_same_bits(over_processes, over_threads);
}

/// Gathers `part` elements of each rank; `round` makes them this call's own.
struct Gather {
  at::Tensor input, output;

  Gather(int64_t part, int round)
      : input(at::full({part}, float(10 * round + get_rank()))), output(at::zeros({get_world_size(), part})) {}

  Pending launch() const { return all_gather_async(output, input, default_group()); }
  bool is_right() const {
    bool right = true;
    for (int rank = 0; rank < get_world_size(); ++rank) {
      right = right && output[rank].equal(input + float(rank - get_rank()));
    }
    return right;
  }
};

/// Rank 1 does not wait for a collective, which it calls before rank 0 or after it; those that follow are right.
void drop_one(bool drops_first, int64_t part, const ProcessGroupPtr& turns) {
  const bool drops = get_rank() == 1;
  const Gather dropped(part, /*round=*/1);
  if (drops != drops_first) {
    barrier(turns);
  }
  Pending pending = dropped.launch();
  if (drops) {
    pending = Pending();
  }
  if (drops == drops_first) {
    barrier(turns);
  }
  pending.wait();
  TESSERA_EXPECT(drops || dropped.is_right());
  for (int round = 2; round < 4; ++round) {
    const Gather next(part, round);
    next.launch().wait();
    TESSERA_EXPECT(next.is_right());
  }
  at::Tensor sum = at::full({part}, float(get_rank()));
  all_reduce(sum, ReduceOp::Sum, default_group());
  TESSERA_EXPECT(sum.equal(at::full({part}, 1.f)));
  // Nobody holds the tensors of the dropped one any more.
  expect_equal(dropped.input.use_count(), size_t{1});
  expect_equal(dropped.output.use_count(), size_t{1});
  expect_equal(dropped.output.storage().use_count(), size_t{1});
}

}  // namespace

const std::vector<c10::ScalarType>& reducible_dtypes() {
  static const std::vector<c10::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kBFloat16,    at::kHalf,
                                                      at::kBool,  at::kByte,   at::kChar,        at::kShort,
                                                      at::kInt,   at::kLong,   at::kComplexFloat};
  return dtypes;
}

void check_same_bits_as_threads(const std::string& backend, int world_size, const std::vector<c10::ScalarType>& dtypes,
                                const std::vector<int64_t>& parts) {
  const auto body = [&](int) {
    for (const at::ScalarType dtype : dtypes) {
      for (const int64_t part : parts) {
        compare_with_threads(dtype, part);
      }
    }
  };
  run_processes(world_size, body, {.backend = backend});
}

void check_sub_groups(const std::string& backend) {
  const auto body = [&](int rank) {
    for (int round = 0; round < 3; ++round) {
      if (rank != 1) {
        const ProcessGroupPtr outer = new_group({2, 0}, "outer");
        at::Tensor gathered = at::zeros({2}, at::kLong);
        all_gather(gathered, at::full({1}, rank, at::kLong), outer);
        expect_equal(gathered[0].item<int64_t>(), 2);
        expect_equal(gathered[1].item<int64_t>(), 0);
      }
      at::Tensor sum = at::full({1}, float(rank));
      all_reduce(sum, ReduceOp::Sum, default_group());
      expect_equal(sum.item<float>(), 3.f);
    }
    destroy_process_group();
    init_process_group({.backend = backend});
    barrier(default_group());
  };
  run_processes(3, body, {.backend = backend});
}

void check_waits_in_any_order(const std::string& backend, int64_t elements) {
  const auto body = [&](int rank) {
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending;
    for (int i = 0; i < 6; ++i) {
      tensors.push_back(at::full({elements * i / 5 + 1}, float(rank + i)));
      pending.push_back(all_reduce_async(tensors.back(), ReduceOp::Sum, default_group()));
    }
    for (int i = 0; i < 6; ++i) {
      pending[(i + 2 * rank) % 6].wait();
    }
    for (int i = 0; i < 6; ++i) {
      TESSERA_EXPECT(tensors[i].equal(at::full({elements * i / 5 + 1}, 3.f + 3 * i)));
    }
  };
  run_processes(3, body, {.backend = backend});
}

void check_all_to_all_that_does_not_fit(const std::string& backend) {
  const auto body = [](int rank) {
    const auto exchange = [](at::Tensor output, std::vector<int64_t> receives) {
      auto input = at::zeros({4});
      std::vector<int64_t> sends = {2, 2};
      default_group()->getBackend(at::kCPU)->alltoall_base(output, input, receives, sends)->wait();
    };
    expect_throws<ValueError>(
        [&] {
          exchange(at::zeros({4}, at::kDouble), {2, 2});
        },
        "all_to_all: input Float and output Double differ");
    const std::vector<int64_t> other_own = rank == 0 ? std::vector<int64_t>{4, 2} : std::vector<int64_t>{2, 4};
    expect_throws<ValueError>([&] { exchange(at::zeros({6}), other_own); },
                              fmt::format("all_to_all: rank {} sends 2 elements to itself, but expects 4", rank));
    exchange(at::zeros({4}), {2, 2});
  };
  run_processes(2, body, {.backend = backend});
}

void check_dropped(const std::string& backend) {
  const auto body = [](int) {
    const ProcessGroupPtr turns = new_group({0, 1}, "turns");
    for (const bool drops_first : {true, false}) {
      for (const int64_t part : {int64_t{1}, int64_t{1000000}}) {
        drop_one(drops_first, part, turns);
      }
    }
  };
  run_processes(2, body, {.backend = backend, .timeout = std::chrono::seconds(20)});
}

void check_peer_that_dies(const std::string& backend, const std::string& error, std::chrono::milliseconds limit) {
  const auto body = [&](int rank) {
    signal(SIGTERM, SIG_IGN);
    barrier(default_group());
    if (rank == 1) {
      raise(SIGKILL);
    }
    const auto start = Clock::now();
    at::Tensor tensor = at::zeros({100000});
    expect_throws<CommError>([&] { all_reduce(tensor, ReduceOp::Sum, default_group()); }, error);
    TESSERA_EXPECT(Clock::now() - start < limit);
    std::fprintf(stderr, "had the error\n");
  };
  const ProcessesResult result = try_run_processes(3, body, {.backend = backend});
  CHECK(result.exit_code == 128 + SIGKILL);
  CHECK_THAT(result.message, ContainsSubstring("rank 1") && ContainsSubstring("killed by signal 9"));
  CHECK_THAT(result.outputs[0], ContainsSubstring("had the error"));
  CHECK_THAT(result.outputs[2], ContainsSubstring("had the error"));
}

void check_peer_that_does_not_come(const std::string& backend) {
  const auto body = [&](int rank) {
    barrier(default_group());
    destroy_process_group();
    init_process_group({.backend = backend, .timeout = std::chrono::seconds(1)});
    barrier(default_group());
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2500));
    } else {
      at::Tensor output = at::zeros({4});
      const auto start = Clock::now();
      std::string message;
      try {
        all_gather(output, at::zeros({2}), default_group());
      } catch (const CommError& failure) {
        message = failure.what();
      }
      TESSERA_EXPECT(message.starts_with("all_gather"));
      TESSERA_EXPECT(message.find("on group 'default' (rank 0 of ranks [0, 1])") != std::string::npos);
      TESSERA_EXPECT(message.find(backend == "gloo" ? "rank 1 left, " : "[1] did not arrive") != std::string::npos);
      TESSERA_EXPECT(Clock::now() - start > std::chrono::milliseconds(800));
      TESSERA_EXPECT(Clock::now() - start < std::chrono::milliseconds(2500));
    }
    // run_processes ends with a barrier, for which a group that timed out is no good.
    destroy_process_group();
    init_process_group({.backend = backend});
  };
  run_processes(2, body, {.backend = backend});
}

void check_longest_time_out(const std::string& backend) {
  const auto body = [](int rank) {
    at::Tensor sum = at::full({3}, float(rank));
    auto pending = all_reduce_async(sum, ReduceOp::Sum, default_group());
    pending.wait();
    TESSERA_EXPECT(sum.equal(at::full({3}, 1.f)));
    std::vector<at::Tensor> tensors = {sum};
    default_group()->getDefaultBackend()->allreduce(tensors)->wait(std::chrono::milliseconds::max());
    TESSERA_EXPECT(sum.equal(at::full({3}, 2.f)));
  };
  run_processes(2, body, {.backend = backend, .timeout = std::chrono::milliseconds::max()});
}

}  // namespace tessera::testing
