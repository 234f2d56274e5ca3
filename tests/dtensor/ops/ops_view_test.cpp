#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/diagonal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/movedim.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/squeeze_copy.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/view_copy.h>
#include <ATen/ops/zeros.h>

#include <functional>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

OpCase one(const char* name, std::vector<int64_t> sizes, TensorFunction function) {
  return {.name = name,
          .inputs = {{std::move(sizes)}},
          .call = [function = std::move(function)](const Tensors& x) -> Tensors { return {function(x[0])}; }};
}

OpCase view(std::vector<int64_t> from, std::vector<int64_t> to) {
  return one("view", std::move(from), [to = std::move(to)](const at::Tensor& x) { return x.view(to); });
}

}  // namespace

TEST_CASE("views that split and merge dims", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      view({6, 4}, {24}),
      view({5, 3}, {15}),
      view({24}, {4, 6}),
      view({24}, {4, -1}),
      view({6, 4}, {2, 3, 4}),
      view({6, 4}, {3, 8}),
      view({4, 3, 2}, {12, 2}),
      view({4, 3, 2}, {4, 6}),
      view({4, 1, 3}, {4, 3}),
      view({5, 3}, {1, 5, 1, 3}),
      view({1, 5}, {5, 1}),
      view({1}, {}),
      view({}, {1, 1}),
      view({0, 3}, {3, 0}),
      view({2, 8, 6}, {2, 8, 3, 2}),
      view({12, 2}, {4, 3, 2}),
      one("reshape of a transposed tensor", {4, 6},
          [](const at::Tensor& x) {
            return x.t().reshape({4, 6});
          }),
      one("flatten", {4, 3, 5}, [](const at::Tensor& x) { return x.flatten(0, 1); }),
      one("unflatten", {4, 12},
          [](const at::Tensor& x) {
            return x.unflatten(1, {4, 3});
          }),
  }));
}

TEST_CASE("views that reorder, add and drop dims", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      one("t", {5, 3}, [](const at::Tensor& x) { return x.t(); }),
      one("t of one dim", {5}, [](const at::Tensor& x) { return x.t(); }),
      one("transpose", {2, 5, 3}, [](const at::Tensor& x) { return x.transpose(0, -1); }),
      one("permute", {2, 5, 3},
          [](const at::Tensor& x) {
            return x.permute({2, 0, -2});
          }),
      one("movedim", {2, 5, 3}, [](const at::Tensor& x) { return at::movedim(x, 0, 2); }),
      one("unsqueeze", {5, 3}, [](const at::Tensor& x) { return x.unsqueeze(1); }),
      one("unsqueeze last", {5, 3}, [](const at::Tensor& x) { return x.unsqueeze(-1); }),
      one("squeeze", {1, 5, 1, 2}, [](const at::Tensor& x) { return x.squeeze(); }),
      one("squeeze.dim", {1, 5, 1}, [](const at::Tensor& x) { return x.squeeze(-1); }),
      one("squeeze.dim of a longer dim", {2, 5}, [](const at::Tensor& x) { return x.squeeze(0); }),
      one("squeeze.dims", {1, 5, 1, 3},
          [](const at::Tensor& x) {
            return x.squeeze(at::IntArrayRef{0, 1, 2});
          }),
      one("expand", {5, 1},
          [](const at::Tensor& x) {
            return x.expand({5, 4});
          }),
      one("expand adds dims", {5, 1, 3},
          [](const at::Tensor& x) {
            return x.expand({2, 5, 2, -1});
          }),
      one("expand 1 to 1", {1, 3},
          [](const at::Tensor& x) {
            return x.expand({1, 3});
          }),
      one("expand to nothing", {1, 3},
          [](const at::Tensor& x) {
            return x.expand({0, 3});
          }),
      one("select", {5, 3}, [](const at::Tensor& x) { return x.select(0, 1); }),
      one("select from the end", {5, 3, 2}, [](const at::Tensor& x) { return x.select(1, -1); }),
      one("diagonal", {4, 5, 3}, [](const at::Tensor& x) { return at::diagonal(x, 1, 0, 2).clone(); }),
  }));
}

TEST_CASE("slices, splits, pads and rolls", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      one("slice", {7, 3}, [](const at::Tensor& x) { return x.slice(0, 1, 5, 2); }),
      one("slice of everything", {7, 3}, [](const at::Tensor& x) { return x.slice(0, 0, 100); }),
      one("slice to the end", {7, 3}, [](const at::Tensor& x) { return x.slice(1, -2); }),
      one("narrow to nothing", {7, 3}, [](const at::Tensor& x) { return x.narrow(0, 2, 0); }),
      one("flip", {5, 3}, [](const at::Tensor& x) { return x.flip({0}); }),
      one("roll", {5, 3}, [](const at::Tensor& x) { return at::roll(x, {2}, {1}); }),
      one("roll of all", {5, 3}, [](const at::Tensor& x) { return at::roll(x, {2}); }),
      one("repeat", {5, 3},
          [](const at::Tensor& x) {
            return x.repeat({2, 1, 2});
          }),
      one("tril", {2, 5, 3}, [](const at::Tensor& x) { return x.tril(-1); }),
      one("triu", {5, 3}, [](const at::Tensor& x) { return x.triu(); }),
      one("pad", {5, 3},
          [](const at::Tensor& x) {
            return at::constant_pad_nd(x, {1, 2});
          }),
      one("pad with a value", {5, 3},
          [](const at::Tensor& x) {
            return at::constant_pad_nd(x, {0, 0, 1, 0}, 4);
          }),
      {.name = "split", .inputs = {{{5, 4}}}, .call = [](const Tensors& x) -> Tensors { return x[0].split(2, 1); }},
      {.name = "split with a rest",
       .inputs = {{{5, 4}}},
       .call = [](const Tensors& x) -> Tensors { return x[0].split(2, 0); }},
      {.name = "split_with_sizes",
       .inputs = {{{5, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return x[0].split_with_sizes({1, 3}, -1);
       }},
      {.name = "chunk", .inputs = {{{5, 6}}}, .call = [](const Tensors& x) -> Tensors { return x[0].chunk(3, 1); }},
      {.name = "unbind", .inputs = {{{5, 3}}}, .call = [](const Tensors& x) -> Tensors { return x[0].unbind(1); }},
  }));
}

TEST_CASE("cat and stack", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "cat",
       .inputs = {{{5, 3}}, {{2, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::cat({x[0], x[1]}, 0)};
       }},
      {.name = "cat along the last dim",
       .inputs = {{{5, 3}}, {{5, 1}}, {{5, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::cat({x[0], x[1], x[2]}, -1)};
       }},
      {.name = "cat with an empty tensor",
       .inputs = {{{0}}, {{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::cat({x[0], x[1]}, 1)};
       },
       .gradients = false},
      {.name = "stack",
       .inputs = {{{5, 3}}, {{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::stack({x[0], x[1]}, 1)};
       }},
      {.name = "stack of scalars",
       .inputs = {{{}}, {{}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::stack({x[0], x[1]})};
       }},
  }));
}

TEST_CASE("views keep shards where whole rows stay together", "[dtensor][ops]") {
  struct Case {
    std::vector<int64_t> from;
    Placement placement;
    std::vector<int64_t> to;
    Placement expected;
    int collectives;
  };
  // Where the rows do not stay together, another dim is cut instead if one can be.
  const std::vector<Case> cases = {
      {{4, 6}, Shard(0), {24}, Shard(0), 0},       {{5, 6}, Shard(0), {30}, Replicate(), 1},
      {{24}, Shard(0), {4, 6}, Shard(0), 0},       {{6, 6}, Shard(1), {6, 2, 3}, Shard(1), 0},
      {{6, 6}, Shard(1), {6, 3, 2}, Shard(0), 1},  {{5, 6}, Shard(0), {5, 2, 3}, Shard(0), 0},
      {{4, 3, 2}, Shard(1), {12, 2}, Shard(1), 1}, {{4, 3, 2}, Shard(2), {12, 2}, Shard(1), 0},
      {{1, 5, 3}, Shard(1), {5, 3}, Shard(0), 0},  {{4, 6}, Partial(), {24}, Partial(), 0},
  };
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    for (const auto& test : cases) {
      const auto local = at::ones(test.from);
      const auto x = redistribute(from_local(local, mesh, {Replicate()}), {test.placement});
      reset_comm_stats();
      const auto y = x.view(test.to);
      expect_equal(to_string(placements(y)), to_string(Placements{test.expected}));
      expect_equal(comm_stats().calls(), test.collectives);
    }
  });
}

TEST_CASE("of complex numbers only sums are sums of their parts", "[dtensor][ops]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto parts = at::full({3, 2}, rank == 0 ? 3 : 2, at::kFloat);
    const auto complex_of = [&](ReduceOp op) { return at::view_as_complex(from_local(parts, mesh, {Partial(op)})); };
    expect_equal(to_string(placements(complex_of(ReduceOp::Sum))), "(Partial(Sum))");
    expect_equal(at::view_as_real(full_tensor(complex_of(ReduceOp::Sum))).eq(5).all().item<bool>(), true);
    expect_equal(at::view_as_real(full_tensor(complex_of(ReduceOp::Max))).eq(3).all().item<bool>(), true);
    expect_equal(at::view_as_real(full_tensor(complex_of(ReduceOp::Product))).eq(6).all().item<bool>(), true);
  });
}

TEST_CASE("a view shares memory with its shard", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    x.view({2, 12}).mul_(3);
    x.t().add_(1);
    expect_equal(full_tensor(x).eq(4).all().item<bool>(), true);
  });
}

TEST_CASE("a view that local strides do not allow may not be written", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto columns = at::ones({4, 2}).t();  // though the strides say rows
    const auto x = from_local(columns, mesh, {Shard(0)}, {.stride = std::vector<int64_t>{4, 1}});
    expect_equal(full_tensor(x.view({16})).eq(1).all().item<bool>(), true);
    expect_throws<NotImplementedError>([&] { x.view({16}).mul_(2); }, "use slices of its dims, an op on all of it");
  });
}

TEST_CASE("the copy of a view may be written", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({4, 1, 3}), mesh, {Shard(0)});
    at::view_copy(x, {12}).zero_();
    at::squeeze_copy(x).mul_(2);
    at::squeeze_copy(x, 1).mul_(2);
    expect_equal(full_tensor(x).eq(1).all().item<bool>(), true);
  });
}

TEST_CASE("a view of moved data may not be read once the tensor was written", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    const auto moved = x.narrow(0, 0, 2);
    const auto of_moved = moved.unsqueeze(0), detached = moved.detach();
    const auto sharing = x.view({2, 2});
    const auto result = moved * 3;
    expect_equal(full_tensor(of_moved).sum().item<float>(), 2.f);
    sharing.zero_();
    const auto message = "the tensor that it views was written since";
    for (const auto& stale : {moved, of_moved, detached}) {
      expect_throws<StateError>([&] { stale + 1; }, message);
      expect_throws<StateError>([&] { to_local(stale); }, message);
      expect_throws<StateError>([&] { full_tensor(stale); }, message);
      expect_throws<StateError>([&] { stale.equal(x); }, message);
    }
    expect_equal(full_tensor(x.narrow(0, 0, 2)).sum().item<float>(), 0.f);
    expect_equal(full_tensor(result).sum().item<float>(), 6.f);
    expect_equal(full_tensor(sharing.t()).sum().item<float>(), 0.f);
  });
}

TEST_CASE("gradients pass a view of moved data though its tensor is written", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto leaf = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).set_requires_grad(true);
    const auto x = leaf * 2;
    const auto sum = x.narrow(0, 0, 3).sum();
    x.mul_(5);
    (sum + x.sum()).backward();
    expect_equal(full_tensor(leaf.grad()).sum().item<float>(), 4 * 10.f + 3 * 2.f);
    (leaf * 2).narrow(0, 0, 3).sum().backward();
    expect_equal(full_tensor(leaf.grad()).sum().item<float>(), 4 * 10.f + 2 * 3 * 2.f);
  });
}

TEST_CASE("a leaf's gradient that passed a view of moved data may be written", "[dtensor][ops]") {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      const auto values = at::arange(12, at::kFloat).view({3, 4});
      const auto x = distribute_tensor(values, mesh, {Shard(0)}).requires_grad_();
      const auto w = distribute_tensor(at::arange(12, at::kFloat), mesh, {Shard(0)});
      const auto expected = values * at::arange(12, at::kFloat).view({3, 4}).square() * 2;
      for (int pass = 1; pass <= 2; ++pass) {
        (x.flatten() * w).square().sum().backward();
        expect_bit_equal(full_tensor(x.grad()), expected * pass);
      }
      x.grad().mul_(0.5);
      expect_bit_equal(full_tensor(x.grad()), expected);
      x.grad().zero_();
      expect_bit_equal(full_tensor(x.grad()), at::zeros({3, 4}));
    });
  }
}

TEST_CASE("leaves whose gradients are views of one moved gradient do not share it", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto leaf = [&](std::vector<int64_t> sizes) {
      return distribute_tensor(at::ones(sizes), mesh, {Replicate()}).requires_grad_();
    };
    const auto a = leaf({1, 12}), b = leaf({12});
    const auto w = distribute_tensor(at::ones({3, 4}), mesh, {Shard(0)});
    for (int pass = 1; pass <= 2; ++pass) {
      ((a.view({12}) + b).view({3, 4}) * w).square().sum().backward();
      expect_bit_equal(full_tensor(a.grad()), at::full({1, 12}, 4.f * pass));
      expect_bit_equal(full_tensor(b.grad()), at::full({12}, 4.f * pass));
    }
  });
}

TEST_CASE("writes that autograd does not see make a view of moved data stale, too", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({4}), mesh, {Shard(0)}).requires_grad_();
    const auto writes = std::vector<std::function<void()>>{
        [&] { x.data().mul_(5); },
        [&] {
          const at::NoGradGuard no_grad;
          to_local(x).mul_(5);
        },
        [&] { x.detach().mul_(5); },
    };
    for (const auto& write : writes) {
      const auto view = x.narrow(0, 0, 2);
      write();
      expect_throws<StateError>([&] { full_tensor(view); }, "was written since");
    }
    expect_bit_equal(full_tensor(x.narrow(0, 0, 2).detach()), at::full({2}, 125.f));
  });
}

TEST_CASE("what permuted tensors give once moved lies on every rank as the DTensor says", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::arange(30).reshape({3, 5, 2}), mesh, {Shard(1)});
    const auto sorted = std::get<0>(x.transpose(0, 1).sort(0));
    // A view on every rank, or the first rank would refuse the write: it has two columns, and the second rank one.
    sorted.transpose(0, 1).view({3, 10}).zero_();
    expect_bit_equal(full_tensor(sorted), at::zeros({5, 3, 2}, at::kLong));
  });
}

}  // namespace tessera
