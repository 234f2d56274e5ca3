#include "dtensor/spec/strided_view.h"

#include <ATen/TensorOperators.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

std::optional<SlicedDims> apart(const at::Tensor& base, const at::Tensor& view) {
  const auto meta = TensorMeta::of(view);
  return take_apart(
      TensorMeta::of(base),
      {.sizes = meta.sizes, .strides = meta.strides, .offset = view.storage_offset() - base.storage_offset()});
}

/// Writes to a view of a copy of `x`; the gradient of what is overwritten must not reach `x`.
using Write = void (*)(at::Tensor copy);

at::Tensor gradient(const at::Tensor& x, Write write) {
  auto copy = x.clone();
  write(copy);
  copy.square().sum().backward();
  return x.grad();
}

}  // namespace

TEST_CASE("views are taken apart into slices of dims", "[dtensor]") {
  const auto x = quarters({4, 6});
  CHECK((apart(x, x.slice(0, 1, 4, 2).slice(1, 2, 5)) == SlicedDims{.slices = {{1, 2, 2}, {2, 1, 3}}, .dims = {0, 1}}));
  CHECK((apart(x, x.select(1, 5)) == SlicedDims{.slices = {{0, 1, 4}, {5, 1, 1}}, .dims = {0}}));
  CHECK((apart(x, x.t()) == SlicedDims{.slices = {{0, 1, 4}, {0, 1, 6}}, .dims = {1, 0}}));
  CHECK((apart(x.t(), x) == SlicedDims{.slices = {{0, 1, 6}, {0, 1, 4}}, .dims = {1, 0}}));
  CHECK((apart(x, x.unsqueeze(1)) == SlicedDims{.slices = {{0, 1, 4}, {0, 1, 6}}, .dims = {0, -1, 1}}));
  CHECK((apart(x, x[2][3]) == SlicedDims{.slices = {{2, 1, 1}, {3, 1, 1}}, .dims = {}}));

  const auto gaps = x.slice(1, 0, 6, 4);  // strides 6 and 4, though two columns of 4 are more than a row
  CHECK((apart(gaps, gaps.select(0, 3)) == SlicedDims{.slices = {{3, 1, 1}, {0, 1, 2}}, .dims = {1}}));

  CHECK_FALSE(apart(x, x.view({24})));            // merges dims
  CHECK_FALSE(apart(x, x.diagonal()));            // runs through two dims at once
  CHECK_FALSE(apart(x[0], x[0].expand({2, 6})));  // overlaps itself
  CHECK_FALSE(apart(x.slice(0, 0, 2), x));        // leaves the tensor
}

TEST_CASE("which of a slice's indices lie in a range", "[dtensor]") {
  const DimSlice slice{.start = 1, .step = 3, .count = 3};  // 1, 4, 7
  CHECK((indices_within(slice, {.offset = 3, .length = 6}) == DimRange{.offset = 1, .length = 2}));
  CHECK((indices_within(slice, {.offset = 0, .length = 9}) == DimRange{.offset = 0, .length = 3}));
  CHECK((indices_within(slice, {.offset = 4, .length = 3}) == DimRange{.offset = 1, .length = 1}));
  CHECK(indices_within(slice, {.offset = 5, .length = 2}).length == 0);
  CHECK(indices_within(slice, {.offset = 8, .length = 4}).length == 0);
  CHECK(indices_within(slice, {.offset = 4, .length = 0}).length == 0);
}

TEST_CASE("a write to a view under autograd reaches its part of the gradient only", "[dtensor]") {
  const std::vector<Write> writes = {
      [](at::Tensor y) { y.narrow(1, 1, 2).fill_(7); },
      [](at::Tensor y) { y.select(1, 3).mul_(3); },
      [](at::Tensor y) { y.slice(1, 0, 5, 2).zero_(); },
      [](at::Tensor y) { y.t().narrow(0, 2, 1).add_(1).mul_(2); },
      [](at::Tensor y) { y.unsqueeze(0).select(2, 0).mul_(-1); },
      [](at::Tensor y) { y.narrow(1, 1, 3).narrow(1, 1, 1).exp_(); },
  };
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const auto& placement : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
        for (const auto& write : writes) {
          const auto plain = quarters({4, 5}).requires_grad_();
          const auto x = redistribute(from_local(quarters({4, 5}), mesh, {Replicate()}), {placement}).detach();
          x.set_requires_grad(true);
          expect_bit_equal(full_tensor(gradient(x, write)), gradient(plain, write));
        }
      }
    });
  }
}

TEST_CASE("a write to a view of copies reaches a gradient that comes cut", "[dtensor]") {
  const std::vector<Write> writes = {
      [](at::Tensor y) { y.select(0, 1).mul_(3); },
      [](at::Tensor y) { y.narrow(0, 1, 2).narrow(1, 1, 3).zero_(); },
      [](at::Tensor y) { y.diagonal().mul_(3); },
      [](at::Tensor y) { y.t().select(1, 0).exp_(); },
  };
  for (const int ranks : {2, 3, 5}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const auto& write : writes) {
        const auto values = quarters({4, 5}) / 10;
        const auto plain = values.clone().requires_grad_();
        const auto x = distribute_tensor(values, mesh, {Replicate()}).requires_grad_();
        for (const auto& placement : {Placement(Shard(0)), Placement(Shard(1))}) {
          for (const auto& [leaf, factor] :
               {std::pair{plain, values}, {x, distribute_tensor(values, mesh, {placement})}}) {
            const auto y = leaf * 1;
            write(y);
            (y * factor).sum().backward();
          }
          expect_bit_equal(full_tensor(x.grad()), plain.grad());
        }
      }
    });
  }
}

}  // namespace tessera
