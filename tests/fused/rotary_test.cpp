#include "fused/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <vector>

#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fused/fused_cases.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// A table with equal halves from one of half the features, which is no operand that is differentiated.
at::Tensor table_of(const at::Tensor& half) {
  return at::cat({half, half}, -1).detach();
}

/// Of {x}: rotated by tables of these sizes and half as many features as `rotated`.
struct RotaryTables {
  at::Tensor cos, sin;

  RotaryTables(std::vector<int64_t> sizes, at::ScalarType dtype = at::kDouble) {
    sizes.back() /= 2;
    const auto halves = fused_inputs({{1}, sizes, sizes});
    cos = table_of(halves[1]).to(dtype);
    sin = table_of(halves[2]).to(dtype);
  }
  at::Tensor by_ops(const at::Tensor& x) const {
    const int64_t rotated = cos.size(-1);
    const auto turned = x.narrow(-1, 0, rotated), rest = x.narrow(-1, rotated, x.size(-1) - rotated);
    const auto halves = turned.chunk(2, -1);
    return at::cat({turned * cos + at::cat({-halves[1], halves[0]}, -1) * sin, rest}, -1);
  }
};

/// Tables of the next calls: functions of tests have no state.
const RotaryTables* current = nullptr;

Tensors rotation_of(const Tensors& x) {
  const auto on_device = [&](const at::Tensor& table) { return table.to(x[0].device()); };
  return {rotate_positions(x[0], on_device(current->cos), on_device(current->sin))};
}

Tensors rotation_by_ops(const Tensors& x) {
  return {current->by_ops(x[0])};
}

/// Tables as operands, with equal halves.
Tensors rotation_by_halves(const Tensors& x) {
  return {rotate_positions(x[0], table_of(x[1]), table_of(x[2]))};
}

}  // namespace

TEST_CASE("rotary positions are those of ATen's ops, with their gradients", "[fused]") {
  struct Case {
    std::vector<int64_t> x, tables;
  };
  for (const auto& test : std::vector<Case>{{{2, 3, 5, 8}, {5, 8}},
                                            {{2, 3, 5, 11}, {5, 6}},
                                            {{2, 2, 3, 70}, {2, 1, 3, 68}},
                                            {{1, 1, 1, 2}, {1, 2}},
                                            {{0, 3, 5, 8}, {5, 8}}}) {
    const RotaryTables tables(test.tables);
    current = &tables;
    const auto x = fused_inputs({test.x})[0];
    expect_same_function(rotation_of, rotation_by_ops, {x});
    // As projections write heads, and with rows that are not contiguous.
    const auto by_length = x.transpose(1, 2).contiguous().transpose(1, 2);
    expect_same_function(rotation_of, rotation_by_ops, {by_length});
    CHECK(rotation_of({by_length})[0].strides() == by_length.strides());
    expect_same_function(rotation_of, rotation_by_ops, {x.transpose(2, 3).contiguous().transpose(2, 3)});
  }
}

TEST_CASE("rotary positions in other dtypes round once", "[fused]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const RotaryTables narrow({5, 34}, dtype);
    RotaryTables wide = narrow;
    wide.cos = narrow.cos.to(at::kDouble);
    wide.sin = narrow.sin.to(at::kDouble);
    const auto x = fused_inputs({{2, 3, 5, 40}})[0].to(dtype);
    const double ulp = dtype == at::kBFloat16 ? 1e-2 : dtype == at::kHalf ? 1e-3 : 1e-6;
    expect_close(rotate_positions(x, narrow.cos, narrow.sin).to(at::kDouble), wide.by_ops(x.to(at::kDouble)),
                 {.rtol = 0, .atol = ulp * 4});
  }
}

TEST_CASE("rotary positions leave to ATen what their kernels do not take", "[fused]") {
  const RotaryTables tables({5, 8});
  current = &tables;
  expect_same_function(rotation_of, rotation_by_ops, fused_inputs({{3, 5, 8}}));  // three dims
  auto differentiable = tables;
  differentiable.cos.requires_grad_();
  rotate_positions(fused_inputs({{1, 2, 5, 8}})[0], differentiable.cos, tables.sin).sum().backward();
  CHECK(differentiable.cos.grad().defined());
}

TEST_CASE("rotary positions stay where their rows are", "[fused]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const RotaryTables tables({5, 8});
    const auto x = fused_inputs({{2, 4, 5, 8}})[0];
    const auto cos = distribute_tensor(tables.cos, mesh, {Replicate()});
    const auto sin = distribute_tensor(tables.sin, mesh, {Replicate()});
    for (const int64_t dim : {0, 1, 2}) {
      const ExplicitRedistribution communicates;  // a table may be cut, which communicates nothing
      const auto rotated = rotate_positions(distribute_tensor(x, mesh, {Shard(dim)}), cos, sin);
      expect_equal(to_string(placements(rotated)), to_string({Shard(dim)}));
      expect_close(full_tensor(rotated), tables.by_ops(x), {.rtol = 1e-12, .atol = 1e-12});
    }
    const auto terms = from_local(x, mesh, {Partial()});
    expect_equal(to_string(placements(rotate_positions(terms, cos, sin))), "(Partial(Sum))");
  });
}

TEST_CASE("rotary positions run on shards under every placement", "[fused]") {
  CHECK_NOTHROW(check_ops({
      {.name = "rotate_positions", .inputs = {{{3, 2, 5, 6}}, {{5, 3}}, {{5, 3}}}, .call = rotation_by_halves},
      {.name = "rotate_positions by rows of a batch",
       .inputs = {{{5, 2, 1, 5}}, {{5, 1, 1, 2}}, {{5, 1, 1, 2}}},
       .call = rotation_by_halves},
  }));
}

}  // namespace tessera::testing
