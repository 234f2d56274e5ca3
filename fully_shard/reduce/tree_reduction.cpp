#include "fully_shard/reduce/tree_reduction.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "base/error.h"

namespace tessera {

namespace {

/// Collective in flight, and its continuation.
class FollowedWork final : public c10d::Work {
 public:
  FollowedWork(Pending pending, std::function<void()> then) : pending_(std::move(pending)), then_(std::move(then)) {}

  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    pending_.wait();
    if (auto then = std::exchange(then_, nullptr)) {
      then();
    }
    return true;
  }
  bool isCompleted() override { return !then_; }
  bool isSuccess() const override { return !then_; }
  void synchronize() override { wait(); }

 private:
  Pending pending_;
  std::function<void()> then_;
};

/// Adds the data of ranks [first, last), one row of `received` each, into the row of the first.
void add_rows(const at::Tensor& received, int64_t first, int64_t last) {
  if (last - first == 1) {
    return;
  }
  const int64_t middle = first + (last - first) / 2;
  add_rows(received, first, middle);
  add_rows(received, middle, last);
  received[first].add_(received[middle]);
}

/// Sends each rank its part of `input`, and calls `then` with the sum of the received data.
Pending exchange(const at::Tensor& input, const ProcessGroupPtr& group,
                 const std::function<void(const at::Tensor& sum)>& then) {
  const int64_t ranks = get_world_size(group);
  const at::Tensor received = at::empty({ranks, input.numel() / ranks}, input.options());
  const at::Tensor sent = input.view({ranks, -1});
  return Pending(c10::make_intrusive<FollowedWork>(all_to_all_async(received, sent, {}, {}, group), [=] {
    add_rows(received, 0, ranks);
    then(received[0]);
  }));
}

void check_is_sum(ReduceOp op) {
  TESSERA_ASSERT(op == ReduceOp::Sum, "a sum over a tree of ranks that is to be {}", op);
}

}  // namespace

TreeParts tree_parts(int64_t rank, int64_t ranks, int64_t parts) {
  TESSERA_ASSERT(parts >= least_parts(ranks) && std::has_single_bit(static_cast<uint64_t>(parts)),
                 "{} parts for {} ranks", parts, ranks);
  TreeParts range{.first = 0, .count = parts};
  for (int64_t first = 0, last = ranks; last - first > 1;) {
    const int64_t middle = first + (last - first) / 2;
    range.count /= 2;
    if (rank < middle) {
      last = middle;
    } else {
      first = middle;
      range.first += range.count;
    }
  }
  return range;
}

int64_t least_parts(int64_t ranks) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(ranks)));
}

Pending tree_reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                            const ProcessGroupPtr& group) {
  check_is_sum(op);
  return exchange(input, group, [output](const at::Tensor& sum) { output.copy_(sum); });
}

Pending tree_all_reduce(const at::Tensor& tensor, ReduceOp op, const ProcessGroupPtr& group) {
  check_is_sum(op);
  const int64_t ranks = get_world_size(group);
  if (ranks == 1) {
    return {};
  }
  const int64_t numel = tensor.numel(), chunk = (numel + ranks - 1) / ranks;
  at::Tensor padded = tensor;
  if (chunk * ranks != numel) {
    padded = at::empty({chunk * ranks}, tensor.options());
    padded.narrow(0, 0, numel).copy_(tensor);
    padded.narrow(0, numel, chunk * ranks - numel).zero_();
  }
  return exchange(padded, group, [=](const at::Tensor& sum) {
    all_gather(padded, sum, group);
    if (!padded.is_same(tensor)) {
      tensor.copy_(padded.narrow(0, 0, numel));
    }
  });
}

}  // namespace tessera
