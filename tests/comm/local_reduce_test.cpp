#include "comm/backend/local_reduce.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

at::Tensor reduce(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::Tensor output = at::zeros_like(inputs[0]);
  std::vector<const void*> pointers;
  for (const at::Tensor& input : inputs) {
    pointers.push_back(input.const_data_ptr());
  }
  reduce_in_order(output.mutable_data_ptr(), pointers, output.numel(), output.scalar_type(), op);
  return output;
}

TEST_CASE("each operation on float") {
  const std::vector<at::Tensor> inputs = {at::tensor({1.f, -2.f, 3.f}), at::tensor({4.f, 5.f, -6.f})};
  CHECK(reduce(inputs, ReduceOp::Sum).equal(at::tensor({5.f, 3.f, -3.f})));
  CHECK(reduce(inputs, ReduceOp::Avg).equal(at::tensor({2.5f, 1.5f, -1.5f})));
  CHECK(reduce(inputs, ReduceOp::Min).equal(at::tensor({1.f, -2.f, -6.f})));
  CHECK(reduce(inputs, ReduceOp::Max).equal(at::tensor({4.f, 5.f, 3.f})));
  CHECK(reduce(inputs, ReduceOp::Product).equal(at::tensor({4.f, -10.f, -18.f})));
}

TEST_CASE("sums are in the order of the ranks, over blocks of any length") {
  for (const int64_t numel : {0, 1, 1023, 1024, 1025, 3000}) {
    const at::Tensor a = at::randn({numel}), b = at::randn({numel}) * 1e6, c = at::randn({numel});
    CHECK(reduce({a, b, c}, ReduceOp::Sum).equal((a + b) + c));
    CHECK(reduce({c, a, b}, ReduceOp::Sum).equal((c + a) + b));
  }
}

TEST_CASE("half types accumulate in float32 and round once") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor a = at::randn({2000}).to(dtype), b = at::randn({2000}).to(dtype), c = at::randn({2000}).to(dtype);
    const at::Tensor sum = (a.to(at::kFloat) + b.to(at::kFloat)) + c.to(at::kFloat);
    CHECK(reduce({a, b, c}, ReduceOp::Sum).equal(sum.to(dtype)));
    CHECK(reduce({a, b, c}, ReduceOp::Avg).equal((sum / 3).to(dtype)));
  }
  const at::Tensor one = at::full({1}, 1.0, at::kBFloat16), small = at::full({1}, 0.00390625, at::kBFloat16);
  CHECK(reduce({one, small, small}, ReduceOp::Sum).item<float>() == 1.0078125f);
}

TEST_CASE("integers wrap around, bool is a logic value, complex adds") {
  const at::Tensor large = at::full({2}, std::numeric_limits<int64_t>::max(), at::kLong);
  CHECK(reduce({large, at::full({2}, 2, at::kLong)}, ReduceOp::Sum)
            .equal(at::full({2}, std::numeric_limits<int64_t>::min() + 1, at::kLong)));
  for (const at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const at::Tensor a = at::randint(0, 10, {50}, dtype), b = at::randint(0, 10, {50}, dtype);
    CHECK(reduce({a, b}, ReduceOp::Sum).equal(a + b));
    CHECK(reduce({a, b}, ReduceOp::Product).equal(a * b));
  }
  const auto bools = [](std::vector<int> values) { return at::tensor(values).to(at::kBool); };
  const at::Tensor x = bools({1, 1, 0, 0}), y = bools({1, 0, 1, 0});
  const at::Tensor either = bools({1, 1, 1, 0}), both = bools({1, 0, 0, 0});
  CHECK(reduce({x, y}, ReduceOp::Sum).equal(either));
  CHECK(reduce({x, y}, ReduceOp::Max).equal(either));
  CHECK(reduce({x, y}, ReduceOp::Product).equal(both));
  CHECK(reduce({x, y}, ReduceOp::Min).equal(both));
  const at::Tensor u = at::randn({9}, at::kComplexFloat), v = at::randn({9}, at::kComplexFloat);
  CHECK(reduce({u, v}, ReduceOp::Sum).equal(u + v));
}

TEST_CASE("Min and Max hand a NaN on from either side") {
  const float nan = std::nanf("");
  for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
    const at::Tensor result = reduce({at::tensor({nan, 1.f}), at::tensor({1.f, nan})}, op);
    CHECK(std::isnan(result[0].item<float>()));
    CHECK(std::isnan(result[1].item<float>()));
  }
}

TEST_CASE("the output may be one of the inputs") {
  at::Tensor a = at::randn({1500}), b = at::randn({1500});
  const at::Tensor expected = a + b;
  const std::vector<const void*> inputs = {a.const_data_ptr(), b.const_data_ptr()};
  reduce_in_order(b.mutable_data_ptr(), inputs, 1500, at::kFloat, ReduceOp::Sum);
  CHECK(b.equal(expected));
}

TEST_CASE("what has no reduction is refused by name") {
  CHECK_THROWS_AS(check_reducible("all_reduce", at::kLong, ReduceOp::Avg), ValueError);
  CHECK_THROWS_WITH(check_reducible("all_reduce", at::kLong, ReduceOp::Avg),
                    ContainsSubstring("all_reduce: ReduceOp Avg on dtype Long"));
  CHECK_THROWS_AS(check_reducible("all_reduce", at::kComplexFloat, ReduceOp::Max), ValueError);
  CHECK_THROWS_AS(check_reducible("all_reduce", at::kFloat8_e4m3fn, ReduceOp::Sum), NotImplementedError);
  CHECK_NOTHROW(check_reducible("all_reduce", at::kBool, ReduceOp::Sum));
}

}  // namespace
}  // namespace tessera
