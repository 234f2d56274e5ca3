#include <ATen/TensorIndexing.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_fill.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/scatter_reduce.h>
#include <ATen/ops/tensor.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("embedding", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "embedding",
       .inputs = {{{7, 3}}, indices({5}, 7)},
       .call = [](const Tensors& x) -> Tensors { return {at::embedding(x[0], x[1])}; }},
      {.name = "embedding of a batch, with padding",
       .inputs = {{{2, 5}}, indices({3, 4}, 2)},
       .call = [](const Tensors& x) -> Tensors { return {at::embedding(x[0], x[1], 1)}; }},
      {.name = "embedding, gradient scaled by frequency",
       .inputs = {{{4, 3}}, indices({9}, 4)},
       .call = [](const Tensors& x) -> Tensors { return {at::embedding(x[0], x[1], -1, true)}; }},
      {.name = "embedding of one index",
       .inputs = {{{7, 3}}, indices({}, 7)},
       .call = [](const Tensors& x) -> Tensors { return {at::embedding(x[0], x[1])}; }},
  }));
}

TEST_CASE("an index outside a cut table is refused as on one device", "[dtensor][ops]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto wrong = from_local(at::tensor({0, 2}, at::kLong), mesh, {Replicate()});
    for (const auto& placement : {Shard(0), Shard(1)}) {  // the last rank has no row, or no column
      const auto table = distribute_tensor(at::ones({2, 2}), mesh, {placement});
      expect_throws<std::exception>([&] { at::embedding(table, wrong); }, "index out of range");
    }
  });
}

TEST_CASE("reading by index", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "index_select",
       .inputs = {{{5, 3}}, indices({4}, 5)},
       .call = [](const Tensors& x) -> Tensors { return {at::index_select(x[0], 0, x[1])}; }},
      {.name = "gather",
       .inputs = {{{5, 3}}, indices({5, 2}, 3)},
       .call = [](const Tensors& x) -> Tensors { return {at::gather(x[0], 1, x[1])}; }},
      {.name = "gather of fewer rows",
       .inputs = {{{5, 3}}, indices({2, 4}, 3)},
       .call = [](const Tensors& x) -> Tensors { return {at::gather(x[0], 1, x[1])}; }},
      {.name = "x[i]",
       .inputs = {{{5, 3, 2}}, indices({4}, 5)},
       .call = [](const Tensors& x) -> Tensors { return {x[0].index({x[1]})}; }},
      {.name = "x[:, i]",
       .inputs = {{{2, 5, 3}}, indices({4, 2}, 5)},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0].index({at::indexing::Slice(), x[1]})};
       }},
      {.name = "x[i, j]",
       .inputs = {{{5, 3, 2}}, indices({4, 1}, 5), indices({3}, 3)},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0].index({x[1], x[2]})};
       }},
      {.name = "x[i, :, j]",
       .inputs = {{{3, 2, 4}}, indices({5}, 3), indices({5}, 4)},
       .call = [](const Tensors& x) -> Tensors {
         return {x[0].index({x[1], at::indexing::Slice(), x[2]})};
       }},
      {.name = "x[mask]",
       .inputs = {{{5, 3}}, mask({5})},
       .call = [](const Tensors& x) -> Tensors { return {x[0].index({x[1]})}; }},
      {.name = "masked_select",
       .inputs = {{{5, 3}}, mask({5, 3})},
       .call = [](const Tensors& x) -> Tensors { return {at::masked_select(x[0], x[1])}; }},
      {.name = "nonzero",
       .inputs = {mask({5, 3})},
       .call = [](const Tensors& x) -> Tensors { return {at::nonzero(x[0])}; }},
  }));
}

TEST_CASE("writing by index", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "index_add",
       .inputs = {{{5, 3}}, indices({4}, 5), {{4, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::index_add(x[0], 0, x[1], x[2], 2)}; }},
      {.name = "index_fill",
       .inputs = {{{5, 3}}, indices({2}, 5)},
       .call = [](const Tensors& x) -> Tensors { return {at::index_fill(x[0], 0, x[1], 3)}; }},
      {.name = "index_put, added",
       .inputs = {{{5, 3}}, indices({4}, 5), {{4, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {x[0].index_put({x[1]}, x[2], true)}; }},
      {.name = "index_put of a row",
       .inputs = {{{5, 3}}, indices({1}, 5), {{3}}},
       .call = [](const Tensors& x) -> Tensors { return {x[0].index_put({x[1]}, x[2])}; },
       .gradients = false},
      {.name = "index_put_ of columns",
       .inputs = {{{5, 3}}, indices({2}, 3), {{5, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         auto written = x[0].clone();
         return {written.index_put_({std::optional<at::Tensor>(), x[1]}, x[2], true)};
       },
       .in_place = true},
      {.name = "scatter",
       .inputs = {{{5, 3}}, indices({5, 1}, 3), {{5, 1}}},
       .call = [](const Tensors& x) -> Tensors { return {at::scatter(x[0], 1, x[1], x[2])}; }},
      {.name = "scatter of a number",
       .inputs = {{{5, 3}}, indices({5, 1}, 3)},
       .call = [](const Tensors& x) -> Tensors { return {at::scatter(x[0], 1, x[1], 4)}; }},
      {.name = "scatter_add",
       .inputs = {{{5, 3}}, indices({5, 3}, 5), {{5, 3}}},
       .call = [](const Tensors& x) -> Tensors { return {at::scatter_add(x[0], 0, x[1], x[2])}; }},
      {.name = "scatter_add of fewer rows",
       .inputs = {{{5, 3}}, indices({2, 4}, 3), {{2, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::scatter_add(x[0], 1, x[1], x[2])}; }},
      {.name = "scatter_reduce",
       .inputs = {{{5, 3}}, indices({5, 4}, 3), {{5, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::scatter_reduce(x[0], 1, x[1], x[2], "sum")}; }},
  }));
}

TEST_CASE("lists of indices that differ in what is undefined behind the last are calls of their own",
          "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto plain = at::arange(24, at::kFloat).view({4, 3, 2});
    const auto x = distribute_tensor(plain, mesh, {Shard(0)});
    const auto rows = at::tensor({2, 0, 1}, at::kLong);
    const auto index = distribute_tensor(rows, mesh, {Replicate()});
    using Indices = c10::List<std::optional<at::Tensor>>;
    const std::optional<at::Tensor> none;
    const auto dims_of = [](const at::Tensor& tensor, const at::Tensor& at_rows, size_t trailing) {
      Indices indices({std::optional<at::Tensor>(), std::optional<at::Tensor>(at_rows)});
      for (size_t i = 0; i < trailing; ++i) {
        indices.push_back(std::nullopt);
      }
      return at::index(tensor, indices);
    };
    for (const size_t trailing : {0, 1, 0}) {
      expect_bit_equal(full_tensor(dims_of(x, index, trailing)), dims_of(plain, rows, trailing));
    }
    // One index too many is refused after the right call too.
    expect_throws<std::exception>([&] { dims_of(x, index, 2); }, "too many indices");
  });
}

}  // namespace tessera
