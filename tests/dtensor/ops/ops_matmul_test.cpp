#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addbmm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmv.h>
#include <ATen/ops/addr.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>

#include <functional>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("matrix products", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "mm",
       .inputs = {{{5, 3}}, {{3, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {x[0].mm(x[1])}; }},
      {.name = "mm over nothing",
       .inputs = {{{5, 0}}, {{0, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {x[0].mm(x[1])}; }},
      {.name = "bmm",
       .inputs = {{{3, 5, 2}}, {{3, 2, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::bmm(x[0], x[1])}; }},
      {.name = "mv",
       .inputs = {{{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::mv(x[0], x[1])}; }},
      {.name = "dot",
       .inputs = {{{5}}, {{5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::dot(x[0], x[1])}; }},
      {.name = "matmul, batched",
       .inputs = {{{2, 5, 3}}, {{3, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::matmul(x[0], x[1])}; }},
      {.name = "matmul, broadcast batches",
       .inputs = {{{2, 1, 3, 2}}, {{3, 2, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::matmul(x[0], x[1])}; }},
      {.name = "einsum",
       .inputs = {{{2, 3, 4}}, {{2, 5, 4}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::einsum("bij,bkj->bik", {x[0], x[1]})};
       }},
      {.name = "linear without bias",
       .inputs = {{{2, 3, 4}}, {{5, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::linear(x[0], x[1])}; }},
  }));
}

TEST_CASE("products with a summand", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "addmm",
       .inputs = {{{5, 2}}, {{5, 3}}, {{3, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addmm(x[0], x[1], x[2], 0.5, 2)}; }},
      {.name = "addmm of a row",
       .inputs = {{{2}}, {{5, 3}}, {{3, 2}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addmm(x[0], x[1], x[2])}; }},
      {.name = "addmv of a number",
       .inputs = {{{1}}, {{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addmv(x[0], x[1], x[2])}; }},
      {.name = "addmm_",
       .inputs = {{{5, 2}}, {{5, 3}}, {{3, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         auto sum = x[0].clone();
         return {sum.addmm_(x[1], x[2])};
       },
       .in_place = true},
      {.name = "baddbmm",
       .inputs = {{{5, 4}}, {{3, 5, 2}}, {{3, 2, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::baddbmm(x[0], x[1], x[2], 2, 0.5)}; }},
      {.name = "addmv",
       .inputs = {{{5}}, {{5, 3}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addmv(x[0], x[1], x[2])}; }},
      {.name = "addr",
       .inputs = {{{5, 3}}, {{5}}, {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addr(x[0], x[1], x[2])}; }},
      {.name = "addbmm",
       .inputs = {{{5, 4}}, {{3, 5, 2}}, {{3, 2, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::addbmm(x[0], x[1], x[2])}; }},
      {.name = "linear",
       .inputs = {{{4, 3}}, {{5, 3}}, {{5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::linear(x[0], x[1], x[2])}; }},
      {.name = "linear of three dims",
       .inputs = {{{2, 4, 3}}, {{5, 3}}, {{5}}},
       .call = [](const Tensors& x) -> Tensors { return {at::linear(x[0], x[1], x[2])}; }},
  }));
}

TEST_CASE("a summand that does not fit is refused on every rank, also where there is nothing to add it to",
          "[dtensor][ops]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4});
    const auto whole = [&](at::IntArrayRef sizes) { return distribute_tensor(at::ones(sizes), mesh, {Replicate()}); };
    const auto a = distribute_tensor(at::ones({5, 4}), mesh, {Shard(0)});  // 2, 2, 1 and 0 rows
    const auto b = whole({5, 4}), bias = whole({4});
    const auto expect_refused = [](const std::function<void()>& call) {
      expect_throws<ValueError>(call, "does not expand to the product");
    };
    expect_throws<ValueError>([&] { at::linear(a, b, bias); },
                              "the summand is Float[4], which does not expand to the product, Float[5, 5]");
    expect_refused([&] { at::linear(a.unsqueeze(1), b, bias); });
    expect_refused([&] { at::addmm(bias, a, b.t()); });
    expect_refused([&] { at::addmm(a, a, b.t()); });
    expect_refused([&] { at::addmm(whole({1, 5, 5}), a, b.t()); });
    expect_throws<std::exception>([&] { a.clone().addmm_(a, b.t()); }, "output tensor size [5, 5] should match");
    expect_throws<std::exception>([&] { at::addmv(whole({3}), a, bias); }, "got input (3), mat (5x4)");
    expect_throws<std::exception>([&] { at::addr(bias, a.select(1, 0), bias.slice(0, 0, 3)); },
                                  "The size of tensor a (4)");
    expect_throws<std::exception>([&] { at::baddbmm(bias, a.unsqueeze(1), b.unsqueeze(2)); },
                                  "Target sizes: [5, 1, 1]");
    expect_throws<std::exception>(
        [&] {
          at::addbmm(bias, a.unsqueeze(1), b.t().unsqueeze(0).expand({5, 4, 5}));
        },
        "aten::addbmm of DTensors");
  });
}

TEST_CASE("a product of what is pending, but not linearly, waits for it", "[dtensor][ops]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto pending = [&](at::IntArrayRef sizes, ReduceOp op, at::ScalarType dtype) {
      return from_local(at::full(sizes, rank == 0 ? 3 : 1, dtype), mesh, {Partial(op)});
    };
    const auto ones = distribute_tensor(at::ones({3, 2}), mesh, {Shard(0)});
    const auto of_greatest =
        at::addmm(pending({2, 2}, ReduceOp::Max, at::kFloat), pending({2, 3}, ReduceOp::Max, at::kFloat), ones);
    expect_equal(full_tensor(of_greatest).eq(3 + 3 * 3).all().item<bool>(), true);
    const auto row = from_local(at::ones({2}, at::kLong), mesh, {Replicate()});
    const auto of_integers =
        at::addr(pending({2, 2}, ReduceOp::Sum, at::kLong), row, pending({2}, ReduceOp::Sum, at::kLong));
    expect_equal(full_tensor(of_integers).eq(4 + 4).all().item<bool>(), true);
  });
}

TEST_CASE("a column-wise and a row-wise linear cost one reduction", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = from_local(at::ones({6, 4}), mesh, {Replicate()});
    const auto up = distribute_tensor(at::ones({8, 4}), mesh, {Shard(0)});
    const auto up_bias = distribute_tensor(at::ones({8}), mesh, {Shard(0)});
    const auto down = distribute_tensor(at::ones({4, 8}), mesh, {Shard(1)});
    const auto down_bias = from_local(at::ones({4}), mesh, {Replicate()});
    reset_comm_stats();
    const auto hidden = at::linear(x, up, up_bias);
    expect_equal(to_string(placements(hidden)), "(Shard(1))");
    const auto y = at::linear(hidden, down, down_bias);
    expect_equal(to_string(placements(y)), "(Partial(Sum))");
    expect_equal(comm_stats().calls(), 0);
    expect_equal(full_tensor(y).eq(5 * 8 + 1).all().item<bool>(), true);
    expect_equal(comm_stats().calls(), 1);
  });
}

TEST_CASE("a list of products", "[dtensor][ops]") {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_foreach_mm", ""});
  if (!op) {
    return;  // libtorch 2.11 has none
  }
  const auto products = [&](const Tensors& x) {
    return op->typed<Tensors(at::TensorList, at::TensorList)>().call({x[0], x[1]}, {x[2], x[3]});
  };
  CHECK_NOTHROW(check_ops({
      {.name = "_foreach_mm", .inputs = {{{5, 3}}, {{1, 2}}, {{3, 2}}, {{2, 4}}}, .call = products},
      {.name = "_foreach_mm with nothing", .inputs = {{{2, 0}}, {{3, 2}}, {{0, 3}}, {{2, 1}}}, .call = products},
  }));
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto cut = [&](at::IntArrayRef sizes, int64_t dim, at::ScalarType dtype = at::kFloat) {
      return distribute_tensor(at::ones(sizes, dtype), mesh, {Shard(dim)});
    };
    const auto copies = distribute_tensor(at::ones({4, 3}), mesh, {Replicate()});
    const Tensors factors{cut({2, 4}, 0), cut({5, 4}, 1), copies, cut({4, 3}, 0)};
    reset_comm_stats();
    const auto result = products(factors);
    expect_equal(comm_stats().calls(), 0);
    expect_equal(to_string(placements(result[0])) + to_string(placements(result[1])), "(Shard(0))(Partial(Sum))");
    expect_throws<ValueError>(
        [&] {
          products({cut({2, 4}, 0, at::kDouble), copies, copies, copies.t()});
        },
        "they need one dtype");
  });
}

}  // namespace tessera
