#include "dtensor/local/redistribute.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

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

void check_one_axis(c10::Device device, int ranks, const std::vector<int64_t>& sizes) {
  const auto full = quarters(sizes).to(device);
  run_ranks(ranks, [&](int) {
    const auto mesh = init_device_mesh(device.type(), {ranks});
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

}  // namespace

TEST_CASE("what arrives is strided as a new tensor is, in dims of one element too", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto column = distribute_tensor(quarters({2, 1}), mesh, {Shard(1)});
    expect_equal(to_local(redistribute(column, {Replicate()})).strides().vec(), std::vector<int64_t>{1, 1});
    const auto row = distribute_tensor(quarters({1, 4}), mesh, {Replicate()});
    expect_equal(to_local(redistribute(row, {Shard(1)})).strides().vec(), std::vector<int64_t>{2, 1});
  });
}

TEST_CASE("every pair of placements on one axis, with uneven and empty shards", "[dtensor]") {
  for (const c10::Device device : test_devices()) {
    for (const int ranks : {1, 2, 3, 4}) {
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{5, 3}, {2, 7}, {1, 1}, {0, 4}}) {
        check_one_axis(device, ranks, sizes);
      }
    }
  }
}

namespace {

/// All placements on `axes` axes of `choices`, each layout once, without reductions that do not commute.
std::vector<Placements> layouts(size_t axes, const std::vector<Placement>& choices) {
  std::vector<Placements> all{{}};
  for (size_t axis = 0; axis < axes; ++axis) {
    std::vector<Placements> longer;
    for (const auto& head : all) {
      for (const auto& choice : choices) {
        longer.push_back(head);
        longer.back().push_back(choice);
      }
    }
    all = std::move(longer);
  }
  std::erase_if(all, [&](const Placements& p) { return normalized(p, 2, static_cast<int64_t>(axes), "test") != p; });
  return all;
}

void expect_same_values(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  expect_equal(what + " " + describe_difference(actual, expected, {.rtol = 0, .atol = 0}), what + " ");
}

/// Redistributes `full` between every pair of `all` on a mesh of `shape`, and a gradient back.
void check_every_pair_on(c10::Device device, const std::vector<int64_t>& shape, const std::vector<int64_t>& sizes,
                         const std::vector<Placements>& all) {
  const auto full = quarters(sizes).to(device);
  run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int) {
    const auto mesh = init_device_mesh(device.type(), shape);
    const auto replicated = from_local(full.clone(), mesh, Placements(shape.size(), Replicate()));
    for (const auto& from : all) {
      const auto x = redistribute(replicated, from).detach().requires_grad_();
      for (const auto& to : all) {
        const auto move = to_string(from) + " to " + to_string(to);
        const auto y = redistribute(x, to);
        expect_same_values(full_tensor(y), full, move);
        if (!dtensor_spec(y)->has_partial()) {  // terms of a sum may be any
          expect_same_values(to_local(y), to_local(redistribute(replicated, to)), move + ", local");
        }
        x.mutable_grad() = at::Tensor();
        full_tensor(y).square().sum().backward();
        expect_same_values(full_tensor(x.grad()), full * 2, move + ", gradient");
      }
    }
  });
}

void check_every_pair(const std::vector<int64_t>& shape, const std::vector<int64_t>& sizes,
                      const std::vector<Placements>& all) {
  for (const c10::Device device : test_devices()) {
    check_every_pair_on(device, shape, sizes, all);
  }
}

}  // namespace

TEST_CASE("every pair of layouts on two axes, forward and backward", "[dtensor]") {
  const auto all = layouts(2, {Replicate(), Shard(0), Shard(0, 1), Shard(1), Shard(1, 1), Partial()});
  check_every_pair({2, 2}, {5, 7}, all);
  check_every_pair({2, 3}, {5, 7}, all);
  check_every_pair({2, 2}, {1, 3}, all);
}

TEST_CASE("every pair of layouts on three axes, forward and backward", "[dtensor]") {
  // A third axis brings no step that a device has not run.
  check_every_pair_on(c10::kCPU, {2, 2, 2}, {5, 3},
                      layouts(3, {Replicate(), Shard(0), Shard(0, 1), Shard(1), Partial()}));
}

TEST_CASE("a permuted tensor of four dims with an uneven shard moves", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto full = quarters({3, 3, 2, 4});
    const auto x = redistribute(from_local(full.clone(), mesh, {Replicate()}), {Shard(0)}).permute({0, 2, 3, 1});
    expect_bit_equal(full_tensor(x), full.permute({0, 2, 3, 1}));
    expect_bit_equal(full_tensor(redistribute(x, {Shard(3)})), full.permute({0, 2, 3, 1}));
    const auto terms = redistribute(x, {Partial()});
    expect_bit_equal(full_tensor(redistribute(terms, {Shard(0)})), full.permute({0, 2, 3, 1}));
  });
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
  const auto full = quarters({5, 3});
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
    const auto x = from_local(quarters({4, 2}), mesh, {Replicate()});
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

TEST_CASE("an asynchronous redistribute is the same, and several may be under way", "[dtensor]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    const auto full = quarters({5, 3});
    const auto replicated = from_local(full.clone(), mesh, {Replicate(), Replicate()});
    auto x = redistribute(replicated, {Shard(0), Shard(0)}).detach().requires_grad_();
    auto y = redistribute(replicated, {Partial(), Shard(1)}).detach().requires_grad_();
    auto whole_x = redistribute_async(x, {Replicate(), Replicate()});
    auto cut_y = redistribute_async(y, {Shard(0), Shard(1)});
    auto same = redistribute_async(x, {Shard(0), Shard(0)});
    const auto b = cut_y.wait();
    const auto a = whole_x.wait();
    TESSERA_EXPECT(same.wait().is_same(x));
    expect_bit_equal(to_local(a), full);
    expect_bit_equal(full_tensor(b), full);
    (a.square().sum() + b.sum()).backward();
    expect_bit_equal(full_tensor(x.grad()), full * 2);
    expect_bit_equal(full_tensor(y.grad()), at::ones_like(full));
  });
}

TEST_CASE("redistribute converts what it sends, forward and backward", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto full = at::full({3, 2}, 1.001).to(at::kFloat);
    auto x = redistribute(from_local(full.clone(), mesh, {Replicate()}), {Shard(0)}).detach().requires_grad_();
    reset_comm_stats();
    const auto y = redistribute(x, {Replicate()}, {.forward_dtype = at::kBFloat16});
    expect_equal(comm_stats().bytes_sent(), 8);  // 2 x 2 padded bf16 values to one peer
    expect_equal(y.scalar_type(), at::kBFloat16);
    expect_bit_equal(full_tensor(y), full.to(at::kBFloat16));
    y.sum().backward();
    expect_equal(x.grad().scalar_type(), at::kFloat);
    expect_bit_equal(full_tensor(x.grad()), at::ones_like(full));

    const auto weights = from_local(full.clone(), mesh, {Replicate()});
    (redistribute(x, {Replicate()}, {.backward_dtype = at::kBFloat16}) * weights).sum().backward();
    expect_bit_equal(full_tensor(x.grad()), at::ones_like(full) + full.to(at::kBFloat16).to(at::kFloat));

    const auto integers = from_local(at::full({2}, 3, at::kLong), mesh, {Replicate()});
    expect_equal(redistribute(integers, {Shard(0)}, {.forward_dtype = at::kHalf}).scalar_type(), at::kLong);
    expect_throws<ValueError>([&] { redistribute(x, {Replicate()}, {.forward_dtype = at::kInt}); },
                              "dtype Int; forward_dtype and backward_dtype are floating dtypes");
  });
}

TEST_CASE("a tensor moves between sub-meshes of one mesh", "[dtensor]") {
  run_ranks(6, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 3}, {"dp", "tp"});
    const auto full = quarters({5, 4});
    const auto tp = redistribute(from_local(full.clone(), mesh["tp"], {Replicate()}), {Shard(0)});
    auto x = tp.detach().requires_grad_();

    const auto y = redistribute(x, mesh, {Shard(0, 1), Shard(0)});
    TESSERA_EXPECT(device_mesh(y) == mesh);
    expect_bit_equal(full_tensor(y), full);
    const auto z = redistribute(y, mesh["dp"], {Shard(1)});
    TESSERA_EXPECT(device_mesh(z) == mesh["dp"]);
    expect_equal(to_local(z).sizes().vec(), std::vector<int64_t>{5, 2});
    expect_bit_equal(full_tensor(z), full);
    z.square().sum().backward();
    expect_equal(to_string(placements(x.grad())), std::string("(Shard(0))"));
    expect_bit_equal(full_tensor(x.grad()), full * 2);

    const auto turned = mesh[{"tp", "dp"}];
    const auto w = redistribute(x, turned, {Shard(0), Shard(0)});  // tp makes the outer cut
    expect_bit_equal(to_local(w), to_local(y));
    const auto flat = mesh.flatten({"dp", "tp"}, "all");
    expect_throws<ValueError>([&] { redistribute(x, flat, {Shard(0)}); }, "was made by flatten");
    const auto other = init_device_mesh(at::kCPU, {6}, {"world"});
    expect_throws<ValueError>([&] { redistribute(x, other, {Shard(0)}); }, "are not sub-meshes of one mesh");
  });
}

TEST_CASE("redistribute refuses what has no meaning", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = from_local(quarters({2, 2}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { redistribute(quarters({2}), {Replicate()}); }, "is not a DTensor");
    expect_throws<ValueError>([&] { redistribute(x, {Shard(2)}); }, "redistribute: Shard(2)");
    expect_throws<ValueError>([&] { redistribute(x, {Replicate(), Replicate()}); }, "for a mesh of 1 axes");
    const auto integers = from_local(at::full({2}, 3, at::kLong), mesh, {Partial(ReduceOp::Avg)});
    expect_throws<NotImplementedError>([&] { redistribute(integers, {Replicate()}); }, "average of integers");
  });
}

TEST_CASE("DTensors without data move, too", "[dtensor]") {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto whole = at::empty({5, 4}, at::kMeta);
      const std::vector<Placement> places = {Replicate(), Shard(0), Shard(1), Partial()};
      for (const auto& from : places) {
        for (const auto& to : places) {
          const auto x = redistribute(distribute_tensor(whole, mesh, {Replicate()}), {from});
          const auto y = redistribute(x, {to});
          TESSERA_EXPECT(y.is_meta() && placements(y) == Placements{to});
          expect_equal(to_local(y).sizes().vec(), dtensor_spec(y)->local_sizes().vec());
          expect_equal(full_tensor(y).sizes().vec(), std::vector<int64_t>{5, 4});
        }
      }
      const auto rows = distribute_tensor(whole, mesh, {Shard(0)});
      TESSERA_EXPECT(rows.matmul(rows.t()).is_meta());
    });
  }
}

TEST_CASE("tensors on equal meshes of different roots each move within their own", "[dtensor]") {
  run_ranks(4, [](int) {
    const auto root = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    const auto alone = DeviceMesh::from_group(root.group("tp"), at::kCPU, "tp");
    const auto full = quarters({4, 2});
    TESSERA_EXPECT(alone == root["tp"]);
    for (const auto& mesh : {alone, root["tp"], alone, root["tp"]}) {
      const auto x = distribute_tensor(full, mesh, {Shard(0)}) * 2;
      TESSERA_EXPECT(device_mesh(x).root() == mesh.root());
      if (mesh.root() == root) {
        expect_bit_equal(full_tensor(redistribute(x, root, {Shard(0), Shard(1)})), full * 2);
      }
    }
  });
}

}  // namespace tessera
