#include "tests/comm/cases/point_to_point_cases.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <iterator>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "base/error.h"
#include "comm/point_to_point.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"

namespace tessera::testing {

namespace {

void expect_same_bytes(const at::Tensor& actual, const at::Tensor& expected) {
  TESSERA_EXPECT(actual.nbytes() == expected.nbytes());
  TESSERA_EXPECT(actual.nbytes() == 0 ||
                 std::memcmp(actual.const_data_ptr(), expected.const_data_ptr(), actual.nbytes()) == 0);
}

/// Bits that depend on all of these.
at::Tensor message(int from, int to, int64_t numel, at::ScalarType dtype) {
  const auto seed = static_cast<uint64_t>(1 + from + 10 * to + 100 * numel);
  return at::randint(0, 100, {numel}, make_generator(seed)).to(dtype);
}

at::Tensor filled(int64_t numel, int value) {
  return at::full({numel}, static_cast<float>(value));
}

/// Both ranks know what is sent.
void pass_message(int from, int to, const at::Tensor& sent) {
  if (get_rank() == from) {
    send(sent, to, default_group());
    return;
  }
  const at::Tensor received = at::zeros(sent.sizes(), sent.options());
  const auto version = received._version();
  recv(received, from, default_group());
  expect_same_bytes(received, sent);
  expect_equal(received._version(), version);
}

/// The tensor goes from rank 0 to rank 1, or comes there.
Pending one_way(const at::Tensor& tensor, const ProcessGroupPtr& group, int tag = 0) {
  return get_rank(group) == 0 ? send_async(tensor, 1, group, tag) : recv_async(tensor, 0, group, tag);
}

}  // namespace

void check_messages(int64_t largest) {
  const ProcessGroupPtr& group = default_group();
  const int rank = get_rank(group), size = get_world_size(group);
  constexpr at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kLong, at::kBool, at::kByte, at::kComplexDouble};
  const int64_t sizes[] = {1, 0, 77, largest};
  for (const at::ScalarType dtype : dtypes) {
    for (const int64_t numel : sizes) {
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          if (from != to && (rank == from || rank == to)) {
            pass_message(from, to, message(from, to, numel, dtype));
          }
        }
      }
    }
  }
  const int64_t rounds = std::size(dtypes) * std::size(sizes), bytes_of_all_dtypes = 4 + 2 + 8 + 1 + 1 + 16;
  expect_equal(comm_stats()[Collective::Send].calls, rounds * (size - 1));
  expect_equal(comm_stats()[Collective::Recv].calls, rounds * (size - 1));
  expect_equal(comm_stats()[Collective::Send].bytes_sent, (size - 1) * (78 + largest) * bytes_of_all_dtypes);
  expect_equal(comm_stats()[Collective::Recv].bytes_sent, 0);
}

void check_exchange(int64_t elements) {
  const ProcessGroupPtr& group = default_group();
  const int rank = get_rank(group), peer = rank ^ 1;
  const at::Tensor sent = filled(elements, rank + 1), received = at::zeros({elements});
  Pending sending = send_async(sent, peer, group);
  recv(received, peer, group);
  sending.wait();
  sending.wait();  // at once
  TESSERA_EXPECT(received.equal(filled(elements, peer + 1)));
  received.zero_();
  Pending receiving = recv_async(received, peer, group);
  send(sent, peer, group);
  receiving.wait();
  TESSERA_EXPECT(received.equal(filled(elements, peer + 1)));
}

void check_ring() {
  const int size = get_world_size();
  std::vector<int64_t> ranks(size);
  for (int i = 0; i < size; ++i) {
    ranks[i] = i;
  }
  const ProcessGroupPtr group = new_group(ranks, "ring");
  const int rank = get_rank(group);
  at::Tensor passed = at::full({1000}, rank, at::kLong);
  for (int step = 0; step < size; ++step) {
    const at::Tensor next = at::zeros({1000}, at::kLong);
    Pending sent = send_async(passed, (rank + 1) % size, group, step);
    recv(next, (rank + size - 1) % size, group, step);
    sent.wait();
    passed = next;
    TESSERA_EXPECT(passed.equal(at::full({1000}, (rank - step - 1 + size) % size, at::kLong)));
  }
}

void check_many_in_flight() {
  constexpr int count = 60;
  const ProcessGroupPtr& group = default_group();
  const int rank = get_rank(group);
  if (rank > 1) {
    return;
  }
  std::vector<at::Tensor> tensors;
  std::vector<Pending> pending;
  for (int i = 0; i < count; ++i) {
    tensors.push_back(rank == 0 ? filled(i + 1, i) : at::zeros({i + 1}));
    pending.push_back(one_way(tensors.back(), group, i));
  }
  for (int i = 0; i < count; ++i) {
    const int place = rank == 0 ? i : (7 * i + 3) % count;
    pending[place].wait();
    TESSERA_EXPECT(tensors[place].equal(filled(place + 1, place)));
  }
}

void check_dropped_messages() {
  const ProcessGroupPtr& group = default_group();
  const int rank = get_rank(group);
  if (rank > 1) {
    return;
  }
  std::vector<at::Tensor> dropped;
  for (const int64_t numel : {3, 1000000, 0, 1}) {
    dropped.push_back(rank == 0 ? filled(numel, 1) : at::zeros({numel}));
    Pending pending = one_way(dropped.back(), group);
    pending = Pending();
  }
  for (const int64_t numel : {0, 5}) {
    const auto last = rank == 0 ? filled(numel, 2) : at::zeros({numel});
    one_way(last, group).wait();
    TESSERA_EXPECT(last.equal(filled(numel, 2)));
    for (const at::Tensor& tensor : dropped) {
      expect_equal(tensor.storage().use_count(), size_t{1});
    }
  }
}

void check_order_is_free() {
  const int size = get_world_size();
  const ProcessGroupPtr& all = default_group();
  std::vector<int64_t> backwards;
  for (int rank = size - 1; rank >= 0; --rank) {
    backwards.push_back(rank);
  }
  const ProcessGroupPtr other = new_group(backwards, "backwards");
  const int rank = get_rank(all), other_rank = get_rank(other);
  const at::Tensor first = filled(100000, rank), second = filled(3, other_rank);
  const at::Tensor from_all = at::zeros({100000}), from_other = at::zeros({3});
  const at::Tensor sum = filled(70000, 1);
  // Only the collectives' order is the same on all ranks.
  Pending reduced, sent, sent_too, received, received_too;
  const auto in_all = [&] {
    sent = send_async(first, (rank + 1) % size, all);
    received = recv_async(from_all, (rank + size - 1) % size, all);
  };
  const auto in_other = [&] {
    received_too = recv_async(from_other, (other_rank + size - 1) % size, other);
    sent_too = send_async(second, (other_rank + 1) % size, other);
  };
  if (rank == 0) {
    reduced = all_reduce_async(sum, ReduceOp::Sum, all);
    in_all();
    in_other();
    reduced.wait();
    barrier(other);
  } else {
    in_other();
    reduced = all_reduce_async(sum, ReduceOp::Sum, all);
    barrier(other);
    in_all();
  }
  for (Pending* work : {&received_too, &sent, &reduced, &received, &sent_too}) {
    work->wait();
  }
  TESSERA_EXPECT(sum.equal(filled(70000, size)));
  TESSERA_EXPECT(from_all.equal(filled(100000, (rank + size - 1) % size)));
  TESSERA_EXPECT(from_other.equal(filled(3, (other_rank + size - 1) % size)));
}

void check_sub_group() {
  const int world_rank = get_rank();
  if (world_rank == 1) {
    return;
  }
  const ProcessGroupPtr group = new_group({3, 0, 2}, "three");
  const int rank = get_rank(group);
  const at::Tensor tensor = at::full({5}, world_rank, at::kLong);
  if (rank == 0) {
    send(tensor, 1, group);
    send(tensor, 2, group);
  } else {
    recv(tensor, 0, group);
    expect_equal(tensor[4].item<int64_t>(), 3);
  }
  barrier(group);
}

void check_c10d() {
  const ProcessGroupPtr& group = default_group();
  std::vector<at::Tensor> tensors = {at::full({3, 2}, 1 + get_rank())};
  if (get_rank() == 0) {
    group->send(tensors, 1, 5)->wait();
    group->recv(tensors, 1, 6)->wait();
  } else if (get_rank() == 1) {
    std::vector<at::Tensor> received = {at::zeros({3, 2}, at::kLong)};
    group->recv(received, 0, 5)->wait();
    TESSERA_EXPECT(received[0].equal(at::full({3, 2}, 1)));
    group->send(tensors, 0, 6)->wait();
  }
  TESSERA_EXPECT(get_rank() > 1 || tensors[0].equal(at::full({3, 2}, 2)));
  std::vector<at::Tensor> two = {tensors[0], tensors[0]};
  expect_throws<ValueError>([&] { group->send(two, get_rank() ^ 1, 0); }, "send: 2 tensors; exactly one is allowed");
  expect_throws<c10::Error>([&] { group->recvAnysource(tensors, 0); }, "does not support recvAnysource");
}

void check_ends_that_differ() {
  const bool sends = get_rank() == 0;
  struct Case {
    at::Tensor tensor;
    int tag;
    std::string sent, received;
  };
  // Rank 0 sends 4 floats with tag 3.
  const std::vector<Case> cases = {
      {at::zeros({9}), 3, "Float[4]", "Float[9]"}, {at::zeros({3}), 3, "Float[4]", "Float[3]"},
      {at::zeros({0}), 3, "Float[4]", "Float[0]"}, {at::zeros({4}, at::kInt), 3, "Float[4]", "Int[4]"},
      {at::zeros({4}), 4, "Float[4]", "Float[4]"}, {at::zeros({100000}), 3, "Float[4]", "Float[100000]"},
  };
  for (const Case& differ : cases) {
    const ProcessGroupPtr pair = new_group({0, 1}, "pair");
    const auto text = fmt::format("rank 0: send(to rank 1, tag 3, {}); rank 1: recv(from rank 0, tag {}, {})",
                                  differ.sent, differ.tag, differ.received);
    const auto call = [&] { sends ? send(filled(4, 1), 1, pair, 3) : recv(differ.tensor, 0, pair, differ.tag); };
    expect_throws<CommError>(call, text);
    expect_throws<CommError>([&] { one_way(filled(4, 1), pair, sends ? 1 : 2).wait(); }, "on group 'pair'");
    barrier(pair);
    const at::Tensor back = filled(4, sends ? 0 : 7);
    sends ? recv(back, 1, pair) : send(back, 0, pair);
    TESSERA_EXPECT(back.equal(filled(4, 7)));
  }
  // The bytes of what is sent first would fit what is received second.
  const ProcessGroupPtr pair = new_group({0, 1}, "pair");
  const at::Tensor one = filled(sends ? 12 : 8, 1), other = filled(12, 2);
  Pending first = one_way(one, pair), second = one_way(other, pair);
  expect_throws<CommError>([&] { second.wait(); }, "what is sent is not what is received");
  expect_throws<CommError>([&] { first.wait(); }, "what is sent is not what is received");
  barrier(default_group());
}

void check_peer_that_left(const std::string& error) {
  ProcessGroupPtr pair = new_group({0, 1}, "pair");
  const at::Tensor tensor = at::zeros({100000});
  one_way(tensor, pair).wait();
  if (get_rank() == 1) {
    pair.reset();
  } else {
    expect_throws<CommError>([&] { recv(tensor, 1, pair); }, error);
    expect_throws<CommError>([&] { send(tensor, 1, pair); }, error);
  }
}

void check_refusals() {
  const ProcessGroupPtr& group = default_group();
  const int rank = get_rank(group), size = get_world_size(group), peer = rank ^ 1;
  const at::Tensor tensor = at::zeros({2, 3});
  expect_throws<ValueError>([&] { send(tensor, size, group); },
                            fmt::format("send: peer {0} of group 'default' (rank {1} of ranks", size, rank));
  expect_throws<ValueError>([&] { recv(tensor, -1, group); }, "another rank of the group is needed");
  expect_throws<ValueError>([&] { recv(tensor, rank, group); }, fmt::format("of 0 to {} and not {}", size - 1, rank));
  expect_throws<ValueError>([&] { send(tensor.t(), peer, group); },
                            "send: the tensor of sizes [3, 2] is not dense and contiguous");
  expect_throws<ValueError>([&] { recv(at::Tensor(), peer, group); }, "recv: the tensor is undefined");
  expect_throws<ValueError>([&] { send(at::empty({2}, at::kMeta), peer, group); }, "no backend for tensors on meta");
  expect_throws<ValueError>([&] { send(tensor, peer, ProcessGroupPtr()); }, "the process group is undefined");
  const ProcessGroupPtr alone = new_group({rank}, "alone");
  expect_throws<ValueError>([&] { send(tensor, 0, alone); }, "send: peer 0 of group 'alone'");
  expect_throws<ValueError>([&] { recv(tensor, 1, alone); }, "recv: peer 1 of group 'alone'");
  expect_equal(comm_stats()[Collective::Send].calls, 0);
}

}  // namespace tessera::testing
