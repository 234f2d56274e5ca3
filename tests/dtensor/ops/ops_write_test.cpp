// Ops that write: in place where the tensor has to move, with new sizes, and into out= tensors.

#include <ATen/autocast_mode.h>
#include <ATen/ops/_foreach_exp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_scatter.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/linalg_inv.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/max.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/renorm.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "dtensor/factories.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// A case of an op that writes to a copy of input 0.
OpCase writing(const char* name, std::vector<Input> inputs, std::function<void(at::Tensor&, const Tensors&)> write) {
  return {.name = name, .inputs = std::move(inputs), .call = [write](const Tensors& x) -> Tensors {
            auto copy = x[0].clone();
            write(copy, x);
            return {copy};
          }};
}

/// Autocast of CPU tensors on this thread.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

}  // namespace

TEST_CASE("writing in place where the tensor has to move", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      writing("add_ to a replicated tensor", {{{5, 3}}, {{5, 3}}}, [](auto& y, const Tensors& x) { y.add_(x[1]); }),
      writing("mul_ by a row", {{{5, 1}}, {{1}}}, [](auto& y, const Tensors& x) { y.mul_(x[1]); }),
      writing("cumsum_", {{{5, 3}}}, [](auto& y, const Tensors&) { y.cumsum_(0); }),
      writing("tril_", {{{5, 3}}}, [](auto& y, const Tensors&) { y.tril_(); }),
      writing("scatter_add_", {{{5, 3}}, indices({2, 3}, 5), {{2, 3}}},
              [](auto& y, const Tensors& x) { y.scatter_add_(0, x[1], x[2]); }),
      writing("exp_ of a pending sum", {{{4, 2}}}, [](auto& y, const Tensors&) { y.exp_(); }),
      writing("addmm_", {{{4, 2}}, {{4, 3}}, {{3, 2}}}, [](auto& y, const Tensors& x) { y.addmm_(x[1], x[2]); }),
      writing("renorm_, which has no rule of its own", {{{4, 3}}},
              [](auto& y, const Tensors&) { y.renorm_(2, 0, 0.5); }),
  }));
}

TEST_CASE("a moved tensor is written where it was", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto value = at::arange(10, at::kFloat).view({5, 2});
    const auto x = distribute_tensor(value, mesh, {Shard(0)});
    const auto local = to_local(x);
    x.cumsum_(0);
    expect_equal(to_string(placements(x)), "(Shard(0))");
    TESSERA_EXPECT(to_local(x).is_alias_of(local));
    expect_bit_equal(full_tensor(x), value.cumsum(0));
  });
}

TEST_CASE("a pending norm that is written may become anything", "[dtensor][ops]") {
  const auto written = [](const char* name, std::function<void(at::Tensor&)> write) {
    return OpCase{.name = name,
                  .inputs = {{{5, 3}}},
                  .call = [write](const Tensors& x) -> Tensors {
                    Tensors norms = {x[0].norm(), x[0].norm(3), at::linalg_vector_norm(x[0], 0.5, {1}),
                                     x[0].mul(0.01).norm(2, {0}, /*keepdim=*/true), x[0].norm().clone()};
                    for (auto& norm : norms) {
                      write(norm);
                    }
                    return norms;
                  },
                  .gradients = false};
  };
  CHECK_NOTHROW(check_ops({
      written("sub_", [](at::Tensor& norm) { norm.sub_(10); }),
      written("neg_, then add_", [](at::Tensor& norm) { norm.neg_().add_(0.5); }),
      written("mul_", [](at::Tensor& norm) { norm.mul_(-2); }),
      written("div_", [](at::Tensor& norm) { norm.div_(-2); }),
      written("fill_", [](at::Tensor& norm) { norm.fill_(-3); }),
      written("zero_, then sub_", [](at::Tensor& norm) { norm.zero_().sub_(3); }),
      written("log_", [](at::Tensor& norm) { norm.log_(); }),
      written("copy_", [](at::Tensor& norm) { norm.copy_(norm.neg()); }),
      written("out=", [](at::Tensor& norm) { at::sub_out(norm, norm, at::ones_like(norm), 7); }),
      written("of its own view", [](at::Tensor& norm) { norm.unsqueeze_(0).sub_(10); }),
  }));
}

TEST_CASE("a pending norm whose memory others have may not be written", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto x = distribute_tensor(at::arange(6, at::kFloat), init_device_mesh(at::kCPU, {2}), {Shard(0)});
    const auto norm = x.norm();
    const auto detached = norm.detach();
    expect_throws<NotImplementedError>([&] { norm.sub_(10); },
                                       "aten::sub_.Scalar: it writes to Float[] (NormPartial(2))");
    const auto view = x.norm().view({1});
    expect_throws<NotImplementedError>([&] { view.sub_(10); }, "redistribute() it first");
    expect_close(full_tensor(norm), full_tensor(x).norm());
    TESSERA_EXPECT(full_tensor(detached).equal(full_tensor(norm)));
  });
}

TEST_CASE("a new tensor like a pending one holds what is written to it", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "a number and a norm",
       .inputs = {{{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {1 - x[0].norm(), -2.0 / x[0].norm(), 1 - x[0].norm(2, {1}), at::empty_like(x[0].norm()).fill_(-1),
                 x[0].norm(2, {0}).new_empty({3}).fill_(-1)};
       }},
      {.name = "a number and a sum",
       .inputs = {{{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {1 - x[0].sum(0), 2.0 / x[0].sum(), 3.0 / x[0].mean(0)};
       }},
      {.name = "a number by a sum of nothing",
       .inputs = {{{5, 3}}},
       .call = [](const Tensors& x) -> Tensors {
         return {(1.0 / x[0].mul(0).sum(0)).isinf(), (2.0 / x[0].gt(9).to(at::kDouble).sum()).isinf()};
       },
       .gradients = false},
  }));
}

TEST_CASE("in-place ops that change sizes", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      writing("t_", {{{5, 3}}}, [](auto& y, const Tensors&) { y.t_(); }),
      writing("transpose_", {{{5, 3, 2}}}, [](auto& y, const Tensors&) { y.transpose_(0, 2); }),
      writing("unsqueeze_", {{{5, 3}}}, [](auto& y, const Tensors&) { y.unsqueeze_(1); }),
      writing("squeeze_", {{{1, 5, 1}}}, [](auto& y, const Tensors&) { y.squeeze_(); }),
      writing("squeeze_ of a dim", {{{1, 5}}}, [](auto& y, const Tensors&) { y.squeeze_(0); }),
      writing("t_ and then add_", {{{5, 3}}, {{3, 5}}}, [](auto& y, const Tensors& x) { y.t_().add_(x[1]); }),
  }));
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto x = distribute_tensor(at::arange(10, at::kFloat).view({5, 2}), mesh, {Shard(0)});
    x.resize_({3, 2});
    expect_equal(to_string(placements(x)), "(Shard(0))");
    expect_bit_equal(full_tensor(x), at::arange(6, at::kFloat).view({3, 2}));
    const auto y = distribute_tensor(at::arange(6, at::kFloat), mesh, {Shard(0)});
    expect_bit_equal(full_tensor(at::as_strided(y, {2, 2}, {1, 2}, 1)),
                     at::arange(6, at::kFloat).as_strided({2, 2}, {1, 2}, 1));
  });
}

TEST_CASE("a copied view that changed its sizes in place may not be read once its tensor was written",
          "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({5, 2}), mesh, {Shard(0)});
    const auto y = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    auto moved = x.view({1, 10}), own = y.unsqueeze(0);
    moved.squeeze_();
    own.as_strided_({3}, {1});  // which shared memory with y until then
    expect_equal(full_tensor(moved).sum().item<float>(), 10.f);
    expect_equal(full_tensor(own).sum().item<float>(), 3.f);
    x.mul_(3);
    y.mul_(3);
    for (const auto& stale : {moved, own}) {
      expect_throws<StateError>([&] { stale + 1; }, "the tensor that it views was written since");
    }
  });
}

TEST_CASE("out= tensors", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto value = at::arange(20, at::kFloat).view({5, 4});
    const auto x = distribute_tensor(value, mesh, {Shard(0)});
    auto out = distribute_tensor(at::zeros({5, 4}), mesh, {Shard(1)});
    at::add_out(out, x, x, 2);
    expect_equal(to_string(placements(out)), "(Shard(1))");
    expect_bit_equal(full_tensor(out), value * 3);
    auto values = distribute_tensor(at::zeros({4}), mesh, {Shard(0)});
    auto index = distribute_tensor(at::zeros({4}, at::kLong), mesh, {Replicate()});
    at::max_out(values, index, x, 0);
    expect_bit_equal(full_tensor(values), value[4]);
    expect_bit_equal(full_tensor(index), at::full({4}, 4, at::kLong));
    auto product = distribute_tensor(at::zeros({5, 5}), mesh, {Shard(1)});
    at::mm_out(product, x, x.t());
    expect_bit_equal(full_tensor(product), value.mm(value.t()));
    auto resized = distribute_tensor(at::zeros({0}), mesh, {Shard(0)});
    at::sum_out(resized, x, {0});
    expect_bit_equal(full_tensor(resized), value.sum(0));
    auto integers = distribute_tensor(at::zeros({5, 4}, at::kLong), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::add_out(integers, x, x); }, "the result is Float");
    auto plain = at::zeros({5, 4});
    expect_throws<ValueError>([&] { at::add_out(plain, x, x); }, "plain");
  });
}

TEST_CASE("out= tensors under autocast are computed in their own dtype, as on one device", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto value = at::arange(20, at::kFloat).view({5, 4});  // whose products bfloat16 does not hold
    const auto x = distribute_tensor(value, mesh, {Shard(0)});
    const auto transposed = x.t();
    auto product = distribute_tensor(at::zeros({5, 5}), mesh, {Shard(0)});
    {
      const Autocast autocast;
      at::mm_out(product, x, transposed);
    }
    expect_bit_equal(full_tensor(product), value.mm(value.t()));
  });
}

TEST_CASE("as_strided_scatter counts from where the tensor begins, along its strides", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto value = at::arange(12, at::kFloat).view({3, 4});
    const auto x = distribute_tensor(value, mesh, {Shard(1)});
    const auto source = at::zeros({2});
    const auto placed = distribute_tensor(source, mesh, {Replicate()});
    const auto row = at::as_strided_scatter(x.select(0, 1), placed, {2}, {2}, 5);
    expect_bit_equal(full_tensor(row), at::as_strided_scatter(value.select(0, 1), source, {2}, {2}, 5));
    const auto from_its_first = at::as_strided_scatter(x.select(0, 1), placed, {2}, {2});
    expect_bit_equal(full_tensor(from_its_first), at::as_strided_scatter(value.select(0, 1), source, {2}, {2}));
    expect_throws<NotImplementedError>([&] { at::as_strided_scatter(x.t(), placed, {2}, {4}); }, "is not contiguous");
  });
}

TEST_CASE("a gradient whose formula makes plain tensors", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "index_put that replaces",
       .inputs = {{{5, 3}}, indices({2}, 5), {{2, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::index_put(x[0], {x[1]}, x[2])}; }},
  }));
}

TEST_CASE("writes to lists of tensors count as writes", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = distribute_tensor(at::ones({3, 2}), mesh, {Shard(0)});
    const auto column = x.select(1, 1).narrow(0, 1, 2);  // moves, and so is a copy
    at::_foreach_mul_({x}, 2);
    expect_throws<StateError>([&] { full_tensor(column); }, "was written since");

    auto leaf = distribute_tensor(at::ones({3}), mesh, {Shard(0)}).requires_grad_();
    const auto y = leaf * 1, loss = (y * y).sum();
    {
      const at::NoGradGuard no_grad;
      at::_foreach_mul_({y}, 2);
    }
    expect_throws<c10::Error>([&] { loss.backward(); }, "modified by an inplace operation");
  });
}

TEST_CASE("a tensor that is resized leaves no view behind that reads other memory", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto x = zeros({4}, mesh, {Replicate()});
    {
      const auto view = x.view({2, 2});
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {4, 1}, {6}}) {
        expect_throws<NotImplementedError>([&] { x.resize_(sizes); }, "other tensors have its memory too");
      }
      x.resize_({4});
      x.fill_(3);
      expect_bit_equal(full_tensor(view), at::full({2, 2}, 3.0F));
    }
    x.resize_({6});
    expect_bit_equal(full_tensor(x.narrow(0, 0, 4)), at::full({4}, 3.0F));
    x.resize_({2});
    x.fill_(1);
    expect_bit_equal(full_tensor(x), at::ones({2}));
  });
}

TEST_CASE("a pending norm whose memory others have is refused by ranks with empty shards, too", "[dtensor][ops]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    const auto x = distribute_tensor(at::tensor({3.f, 4.f, 0.f, 0.f}).view({1, 4}), mesh, {Shard(0), Shard(1)});
    const auto norm = at::linalg_vector_norm(x, 2, at::IntArrayRef{1});
    const auto view = norm.unsqueeze(0);
    expect_throws<NotImplementedError>([&] { norm.sub_(10); }, "whose memory other tensors have too");
    expect_bit_equal(full_tensor(view), at::full({1, 1}, 5.f));
  });
}

TEST_CASE("a tensor that has to move is not written twice by one op", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto term = from_local(at::ones({2}), mesh, {Partial()});
    expect_throws<ValueError>(
        [&] {
          at::_foreach_exp_({term, term});
        },
        "aten::_foreach_exp_ writes to one tensor twice, as operands 0 and 1");
    auto norm = distribute_tensor(at::tensor({3.f, 4.f, 0.f, 0.f}), mesh, {Shard(0)}).norm();
    expect_throws<ValueError>([&] { at::_foreach_sub_({norm, norm}, 1); }, "redistribute() it first");
    expect_bit_equal(full_tensor(term), at::full({2}, 2.f));
    expect_bit_equal(full_tensor(norm), at::full({}, 5.f));
    auto copies = redistribute(term, {Replicate()});
    at::_foreach_mul_({copies, copies}, 3);
    expect_bit_equal(full_tensor(copies), at::full({2}, 18.f));
  });
}

}  // namespace tessera
