#include "dtensor/redistribute.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "comm/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

namespace {

at::Tensor ramp(std::vector<int64_t> sizes) {
  return at::arange(1, c10::multiply_integers(sizes) + 1, at::kDouble).div(4).reshape(sizes);
}

/// The local tensor under which a DTensor of `placement` on a 1-D mesh is `full`.
at::Tensor local_of(const at::Tensor& full, const DeviceMesh& mesh, const Placement& placement) {
  const int64_t rank = mesh.local_rank();
  const int64_t ranks = mesh.size();
  if (placement.is_shard()) {
    const auto range = chunk_range(full.size(placement.dim()), ranks, rank);
    return full.narrow(placement.dim(), range.offset, range.length).clone();
  }
  if (placement.is_replicate() || placement == Partial(ReduceOp::Avg)) {
    return full.clone();
  }
  if (placement == Partial()) {
    return rank == 0 ? full - (ranks - 1) : at::ones_like(full);
  }
  if (placement == Partial(ReduceOp::Max)) {
    return rank == ranks - 1 ? full.clone() : full - 1;
  }
  if (placement == Partial(ReduceOp::Min)) {
    return rank == ranks - 1 ? full.clone() : full + 1;
  }
  return rank == ranks - 1 ? full.clone() : at::ones_like(full);  // Product
}

const std::vector<Placement> kAll = {Replicate(),
                                     Shard(0),
                                     Shard(1),
                                     Partial(),
                                     Partial(ReduceOp::Avg),
                                     Partial(ReduceOp::Max),
                                     Partial(ReduceOp::Min),
                                     Partial(ReduceOp::Product)};

}  // namespace

TEST_CASE("every pair of placements on one axis, with uneven and empty shards", "[dtensor]") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {2, 7}, {1, 1}, {0, 4}}) {
      const auto full = ramp(sizes);
      run_ranks(ranks, [&](int) {
        const auto mesh = init_device_mesh(at::kCPU, {ranks});
        for (const auto& from : kAll) {
          for (const auto& to : kAll) {
            const auto x = from_local(local_of(full, mesh, from), mesh, {from}, {.shape = sizes});
            const auto y = redistribute(x, {to});
            expect_equal(to_string(placements(y)), to_string(Placements{to}));
            expect_bit_equal(full_tensor(y), full);
            if (to.is_shard() || to.is_replicate()) {
              expect_bit_equal(to_local(y), local_of(full, mesh, to));
            }
          }
        }
      });
    }
  }
}

TEST_CASE("every pair of cuts on two axes", "[dtensor]") {
  const std::vector<Placement> choices{Replicate(), Shard(0), Shard(1), Partial()};
  std::vector<Placements> all;
  for (const auto& a : choices) {
    for (const auto& b : choices) {
      all.push_back({a, b});
    }
  }
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 2}, {2, 3}}) {
    const auto full = ramp({5, 7});
    run_ranks(static_cast<int>(shape[0] * shape[1]), [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, shape);
      const auto replicated = from_local(full.clone(), mesh, {Replicate(), Replicate()});
      for (const auto& from : all) {
        const auto x = redistribute(replicated, from);
        for (const auto& to : all) {
          const auto y = redistribute(x, to);
          expect_bit_equal(full_tensor(y), full);
          const auto direct = redistribute(replicated, to);
          expect_bit_equal(to_local(y), to_local(direct));
        }
      }
    });
  }
}

TEST_CASE("pending norms become the norm of all parts", "[dtensor]") {
  run_ranks(3, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const double terms[] = {3, 4, 12};
    const auto meta = TensorMeta::contiguous({}, at::kDouble);
    const auto x = wrap_local(at::full({}, terms[rank], at::kDouble), DTensorSpec::make(mesh, {NormPartial(2)}, meta));
    expect_close(full_tensor(x), at::full({}, 13., at::kDouble));
  });
}

TEST_CASE("gradients come back in the placements of the input", "[dtensor]") {
  const auto full = ramp({5, 3});
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const std::vector<Placement> choices{Replicate(), Shard(0), Shard(1), Partial()};
      for (const auto& from : choices) {
        for (const auto& to : choices) {
          auto x = redistribute(from_local(full.clone(), mesh, {Replicate()}), {from}).detach();
          x.set_requires_grad(true);
          redistribute(x, {to}).square().sum().backward();
          if (from != to) {
            expect_equal(to_string(placements(x.grad())), to_string(gradient_placements({from})));
          }
          expect_bit_equal(full_tensor(x.grad()), full * 2);
        }
      }
    });
  }
}

TEST_CASE("one collective a step, none for a cut", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = from_local(ramp({4, 2}), mesh, {Replicate()});
    reset_comm_stats();
    const auto rows = redistribute(x, {Shard(0)});
    expect_equal(comm_stats().calls(), 0);
    redistribute(rows, {Shard(0)});
    expect_equal(comm_stats().calls(), 0);
    redistribute(rows, {Shard(1)});
    expect_equal(comm_stats()[Collective::AllToAll].calls, 1);
    redistribute(rows, {Replicate()});
    expect_equal(comm_stats()[Collective::AllGather].calls, 1);
    const auto terms = redistribute(x, {Partial()});
    redistribute(terms, {Shard(0)});
    expect_equal(comm_stats()[Collective::ReduceScatter].calls, 1);
    redistribute(terms, {Replicate()});
    expect_equal(comm_stats()[Collective::AllReduce].calls, 1);
    expect_equal(comm_stats().calls(), 4);
  });
}

TEST_CASE("redistribute refuses what has no meaning", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = from_local(ramp({2, 2}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { redistribute(ramp({2}), {Replicate()}); }, "is not a DTensor");
    expect_throws<ValueError>([&] { redistribute(x, {Shard(2)}); }, "redistribute: Shard(2)");
    expect_throws<ValueError>([&] { redistribute(x, {Replicate(), Replicate()}); }, "for a mesh of 1 axes");
    const auto integers = from_local(at::full({2}, 3, at::kLong), mesh, {Partial(ReduceOp::Avg)});
    expect_throws<NotImplementedError>([&] { redistribute(integers, {Replicate()}); }, "average of integers");
  });
}
