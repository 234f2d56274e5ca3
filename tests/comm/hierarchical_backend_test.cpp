// The hierarchical backend over backends of threads, beside the flat default group of the same ranks.

#include "comm/hierarchical_backend.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/point_to_point.h"
#include "comm/process_group.h"
#include "comm/threads/thread_backend.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

c10::intrusive_ptr<GroupBackend> thread_part(const std::shared_ptr<ThreadWorld>& world, const std::string& key,
                                             const std::vector<int>& places, int rank) {
  GroupInfo info{.name = key, .timeout = std::chrono::seconds(20)};
  for (const int place : places) {
    info.rank = place == rank ? static_cast<int>(info.ranks.size()) : info.rank;
    info.ranks.push_back(place);
  }
  auto thread_group = world->join(key, info.ranks);
  return c10::make_intrusive<ThreadBackend>(std::move(info), std::move(thread_group));
}

ProcessGroupPtr make_group(const std::shared_ptr<ThreadWorld>& world, const HostLayout& layout, int rank) {
  GroupInfo info{.name = "all", .rank = rank, .timeout = std::chrono::seconds(20)};
  std::vector<int> all;
  for (int place = 0; place < layout.size(); ++place) {
    info.ranks.push_back(place);
    all.push_back(place);
  }
  auto host = thread_part(world, fmt::format("host {}", layout.host_index(rank)), layout.ranks_on_host(rank), rank);
  auto across =
      thread_part(world, fmt::format("across {}", layout.local_rank(rank)), layout.ranks_across_hosts(rank), rank);
  const auto backend = make_hierarchical_backend(
      {.info = info, .layout = layout, .host = std::move(host), .across = std::move(across), .make_flat = [=] {
         return thread_part(world, "flat", all, rank);
       }});
  auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, layout.size());
  const auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(c10::DeviceType::CPU, type, backend);
  group->setDefaultBackend(type);
  return group;
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::Min:
      return at::minimum(a, b);
    case ReduceOp::Max:
      return at::maximum(a, b);
    case ReduceOp::Product:
      return a * b;
    default:
      return a + b;
  }
}

at::Tensor reduced(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  at::Tensor result = tensors[0];
  for (size_t i = 1; i < tensors.size(); ++i) {
    result = combine(result, tensors[i], op);
  }
  return op == ReduceOp::Avg ? result / static_cast<double>(tensors.size()) : result;
}

/// The reduction of all ranks' `own`, each host's first.
at::Tensor expected_reduction(const at::Tensor& own, const HostLayout& layout, ReduceOp op) {
  const auto all = at::zeros({layout.size(), own.numel()}, own.options());
  all_gather(all, own, default_group());
  std::vector<at::Tensor> hosts;
  for (int host = 0; host < layout.hosts; ++host) {
    std::vector<at::Tensor> ranks;
    for (const int rank : layout.ranks_on_host(host * layout.per_host)) {
      ranks.push_back(all[rank]);
    }
    hosts.push_back(reduced(ranks, op));
  }
  return reduced(hosts, op);
}

void check_collectives(const ProcessGroupPtr& group, const HostLayout& layout, int rank, int64_t numel) {
  const auto values = [&](int64_t count, int seed) {
    return at::randn({count}, make_generator(static_cast<uint64_t>(100 * seed + rank)));
  };
  const int64_t ranks = layout.size();
  const auto own = values(numel, 1);
  auto gathered = at::zeros({ranks, numel}), flat_gathered = at::zeros({ranks, numel});
  all_gather(gathered, own, group);
  all_gather(flat_gathered, own, default_group());
  expect_bit_equal(gathered, flat_gathered);
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
    const auto input = values(ranks * numel, 2);
    const auto expected = expected_reduction(input, layout, op);
    auto scattered = at::zeros({numel});
    reduce_scatter(scattered, input, op, group);
    expect_bit_equal(scattered, expected.narrow(0, rank * numel, numel));
    auto reduced_all = input.clone();
    all_reduce(reduced_all, op, group);
    expect_bit_equal(reduced_all, expected);
  }
  for (int source = 0; source < layout.size(); ++source) {
    auto tensor = at::full({numel}, 1.0 * rank);
    broadcast(tensor, source, group);
    expect_bit_equal(tensor, at::full({numel}, 1.0 * source));
  }
  auto exchanged = at::zeros({ranks, numel}), flat_exchanged = at::zeros({ranks, numel});
  const auto sent = values(ranks * numel, 3).view({ranks, numel});
  all_to_all(exchanged, sent, {}, {}, group);
  all_to_all(flat_exchanged, sent, {}, {}, default_group());
  expect_bit_equal(exchanged, flat_exchanged);
  barrier(group);
}

}  // namespace

TEST_CASE("hosts make a layout where each has as many ranks, one host after the other", "[comm]") {
  const auto layout = [](const std::vector<std::string>& hosts) -> std::vector<int> {
    const auto found = find_host_layout(hosts);
    return found ? std::vector<int>{found->hosts, found->per_host} : std::vector<int>{};
  };
  const std::vector<int> none;
  CHECK(layout({"a", "a", "b", "b"}) == std::vector<int>{2, 2});
  CHECK(layout({"a", "a", "a", "b", "b", "b"}) == std::vector<int>{2, 3});
  CHECK(layout({"a", "a", "b", "b", "c", "c"}) == std::vector<int>{3, 2});
  CHECK(layout({}) == none);
  CHECK(layout({"a", "a"}) == none);            // shared memory does
  CHECK(layout({"a", "b"}) == none);            // nothing to share
  CHECK(layout({"a", "a", "b"}) == none);       // not as many
  CHECK(layout({"a", "b", "a", "b"}) == none);  // not one host after the other
  CHECK(layout({"a", "a", "b", "a"}) == none);
  CHECK(layout({"a", "a", "b", "b", "a", "a"}) == none);
  CHECK(layout({"", "", "b", "b"}) == none);  // a host that cannot be told
  const HostLayout six{.hosts = 2, .per_host = 3};
  CHECK(six.ranks_on_host(4) == std::vector<int>{3, 4, 5});
  CHECK(six.ranks_across_hosts(4) == std::vector<int>{1, 4});
}

TEST_CASE("a hierarchical group does what a flat one does, and adds up each host first", "[comm]") {
  const auto layout = GENERATE(HostLayout{2, 2}, HostLayout{2, 3}, HostLayout{3, 2});
  const auto world = std::make_shared<ThreadWorld>(layout.size());
  run_ranks(layout.size(), [&](int rank) {
    const auto group = make_group(world, layout, rank);
    for (const int64_t numel : {0, 1, 5, 1000}) {
      check_collectives(group, layout, rank, numel);
    }
    auto half = at::full({5}, 1 + rank, at::kBFloat16);
    all_reduce(half, ReduceOp::Sum, group);
    expect_bit_equal(half, at::full({5}, layout.size() * (layout.size() + 1) / 2, at::kBFloat16));
  });
}

TEST_CASE("works of a hierarchical group are waited for in any order", "[comm]") {
  const HostLayout layout{2, 2};
  const auto world = std::make_shared<ThreadWorld>(layout.size());
  run_ranks(layout.size(), [&](int rank) {
    const auto group = make_group(world, layout, rank);
    std::vector<at::Tensor> tensors;
    std::vector<Pending> works;
    for (int call = 0; call < 6; ++call) {
      tensors.push_back(at::full({1 << (2 * call)}, 1.0 + rank + call));
      works.push_back(all_reduce_async(tensors.back(), ReduceOp::Sum, group));
    }
    for (int i = 0; i < 6; ++i) {
      const int call = (i + rank) % 6;
      works[static_cast<size_t>(call)].wait();
      const auto& tensor = tensors[static_cast<size_t>(call)];
      expect_bit_equal(tensor, at::full_like(tensor, 10.0 + 4 * call));
    }
  });
}

TEST_CASE("messages of a hierarchical group go over the host or across hosts, beside its collectives", "[comm]") {
  const HostLayout layout{2, 2};
  const auto world = std::make_shared<ThreadWorld>(layout.size());
  run_ranks(layout.size(), [&](int rank) {
    const auto group = make_group(world, layout, rank);
    const int beside = rank ^ 1, across = (rank + 2) % 4, neither = 3 - rank;
    auto sum = at::full({1000}, 1.0 * rank);
    Pending reduced;
    if (rank != 3) {
      reduced = all_reduce_async(sum, ReduceOp::Sum, group);
    }
    const auto own = at::full({100000}, 1.0 * rank);
    for (const int peer : {beside, across}) {
      const auto received = at::zeros({100000});
      auto sent = send_async(own, peer, group, 6);
      recv(received, peer, group, 6);
      sent.wait();
      expect_bit_equal(received, at::full({100000}, 1.0 * peer));
    }
    if (rank == 3) {
      reduced = all_reduce_async(sum, ReduceOp::Sum, group);  // the others waited for messages before it came
    }
    reduced.wait();
    expect_bit_equal(sum, at::full({1000}, 6.0));
    expect_throws<NotImplementedError>([&] { send(own, neither, group); },
                                       fmt::format("send: peer {} on group 'all' (rank {} of", neither, rank));
    expect_throws<NotImplementedError>([&] { recv(own, neither, group); }, "make a group of the two ranks");
    expect_throws<ValueError>([&] { recv(own, 4, group); }, "recv: peer 4 of group 'all'");
  });
}

TEST_CASE("a hierarchical group fails on every rank where one leaves, and stays failed", "[comm]") {
  const HostLayout layout{2, 2};
  const auto world = std::make_shared<ThreadWorld>(layout.size());
  run_ranks(layout.size(), [&](int rank) {
    const auto group = make_group(world, layout, rank);
    barrier(group);
    if (rank == 3) {
      world->leave(3);
    } else {
      expect_throws<CommError>([&] { barrier(group); }, "have ended without calling it");
      world->leave(rank);
      expect_throws<CommError>([&] { barrier(group); }, "an earlier call failed");
    }
  });
}

TEST_CASE("a hierarchical all_reduce of nothing beside one of something is an error on every rank", "[comm]") {
  const HostLayout layout{2, 2};
  const auto world = std::make_shared<ThreadWorld>(layout.size());
  run_ranks(layout.size(), [&](int rank) {
    const auto group = make_group(world, layout, rank);
    expect_throws<CommError>([&] { all_reduce(at::zeros({rank == 3 ? 0 : 5}), ReduceOp::Sum, group); }, "(Sum, Float[");
    world->leave(rank);
  });
}

// two_hosts_test.sh runs it as four processes.
TEST_CASE("ranks of two hosts choose the hierarchical backend, and smaller groups what suits them", "[.two_hosts]") {
  init_process_group({.timeout = std::chrono::seconds(20)});
  const int rank = get_rank();
  const bool is_first_host = rank < 2;
  CHECK(get_backend(default_group()) == "hierarchical");
  const auto host = new_group(is_first_host ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{2, 3}, "host");
  CHECK(get_backend(host) == "shm");
  const auto across = new_group(rank % 2 == 0 ? std::vector<int64_t>{0, 2} : std::vector<int64_t>{1, 3}, "across");
  CHECK(get_backend(across) == "gloo");
  for (const auto& [group, sum] :
       {std::pair{default_group(), 10.f}, {host, is_first_host ? 3.f : 7.f}, {across, rank % 2 == 0 ? 4.f : 6.f}}) {
    const auto tensor = at::full({1000}, 1.f + static_cast<float>(rank));
    all_reduce(tensor, ReduceOp::Sum, group);
    expect_bit_equal(tensor, at::full({1000}, sum));
  }
  const auto gathered = at::zeros({4});
  all_gather(gathered, at::full({1}, static_cast<float>(rank)), default_group());
  expect_bit_equal(gathered, at::arange(4.f));
  const auto exchanged = at::zeros({4});
  all_to_all(exchanged, at::arange(4.f) + 4 * rank, {}, {}, default_group());
  expect_bit_equal(exchanged, at::arange(4.f) * 4 + rank);
  std::vector<ProcessGroupPtr> groups;
  std::vector<at::Tensor> outputs;
  std::vector<Pending> works;
  for (const char* name : {"a", "b"}) {
    groups.push_back(new_group({0, 1, 2, 3}, name));
    outputs.push_back(at::zeros({4}));
  }
  for (size_t i = 0; i < groups.size(); ++i) {  // both connect all ranks for it, at once
    works.push_back(all_to_all_async(outputs[i], at::arange(4.f) + 4 * rank, {}, {}, groups[i]));
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    works[i].wait();
    expect_bit_equal(outputs[i], at::arange(4.f) * 4 + rank);
  }
  const auto passed = at::full({1}, static_cast<float>(rank));
  for (const int peer : {rank ^ 1, (rank + 2) % 4}) {
    const auto received = at::zeros({1});
    auto sent = send_async(passed, peer, default_group());
    recv(received, peer, default_group());
    sent.wait();
    CHECK(received.item<float>() == static_cast<float>(peer));
  }
  destroy_process_group();
}

// lost_host_test.sh runs it as four processes, and takes two of them away.
TEST_CASE("ranks of a host have an error when the other one is lost", "[.lost_host]") {
  const std::string backend = std::getenv("TESSERA_TEST_BACKEND");
  init_process_group({.backend = backend == "gloo" ? backend : "", .timeout = std::chrono::seconds(60)});
  CHECK(get_backend(default_group()) == backend);
  auto last = std::chrono::steady_clock::now();
  try {
    const auto tensor = at::zeros({1000});
    for (int call = 0;; ++call) {
      all_reduce(tensor, ReduceOp::Sum, default_group());
      last = std::chrono::steady_clock::now();
      if (call == 100) {
        std::fprintf(stderr, "rank %d goes on\n", get_rank());
      }
    }
  } catch (const CommError& error) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - last);
    std::fprintf(stderr, "rank %d: lost after %d ms: %s\n", get_rank(), static_cast<int>(waited.count()), error.what());
  }
}

}  // namespace tessera
