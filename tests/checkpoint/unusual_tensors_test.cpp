// Tensors and names that few models have, from 4 ranks to 3 with other cuts.

#include <ATen/ops/arange.h>
#include <ATen/ops/conj.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <functional>

#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

const std::vector<at::ScalarType> kDtypes = {
    at::kBool,   at::kByte,         at::kChar,   at::kShort,         at::kInt,
    at::kLong,   at::kUInt16,       at::kHalf,   at::kBFloat16,      at::kFloat,
    at::kDouble, at::kComplexFloat, at::kUInt32, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
};

/// Under names that JSON, file systems and formats could trip over.
const std::vector<std::string> kNames = {"a b",   "\"quoted\"", "back\\slash", "new\nline", "{0}",
                                         "../up", "%s",         "ünïcödé",     "."};

at::Tensor numbers(int64_t rows, at::ScalarType dtype) {
  return at::arange(rows * 3).remainder(2).to(dtype).view({rows, 3});
}

/// All of them with what `value` makes of a whole tensor.
dcp::State make_state(const std::function<at::Tensor(const at::Tensor&)>& value) {
  dcp::State state;
  for (const auto dtype : kDtypes) {
    state.model[c10::toString(dtype)] = value(numbers(5, dtype));
  }
  for (size_t i = 0; i < kNames.size(); ++i) {
    state.model[kNames[i]] = value(at::full({2, 1}, static_cast<double>(i)));
  }
  state.model["few rows"] = value(numbers(1, at::kFloat));
  state.model["no rows"] = value(at::empty({0, 3}));
  state.model["no columns"] = value(at::empty({3, 0}));
  state.optimizer["no rows"] = value(at::empty({0, 3}));
  return state;
}

}  // namespace

TEST_CASE("dtypes, names, tensors without elements and dims: what was saved is loaded under other cuts") {
  const TempFolder folder;
  const auto path = folder.path("c");
  const auto scalar = at::full({}, 1.5);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {4}, {"dp"});
    auto state = make_state([&](const at::Tensor& whole) { return distribute_tensor(whole, mesh, {Shard(0)}); });
    state.model["scalar"] = distribute_tensor(scalar, mesh, {Replicate()});
    state.user["text"] = std::string("\0\n\"\\", 4);
    dcp::save(path, state);
  });
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"dp"});
    auto state =
        make_state([&](const at::Tensor& whole) { return distribute_tensor(at::zeros_like(whole), mesh, {Shard(1)}); });
    state.model["scalar"] = distribute_tensor(at::zeros({}), mesh, {Replicate()});
    state.user["text"] = std::string();
    dcp::load(path, state);
    const auto expected = make_state([](const at::Tensor& whole) { return whole; });
    for (const auto& [key, whole] : expected.model) {
      const auto loaded = full_tensor(std::get<at::Tensor>(state.model.at(key)));
      TESSERA_EXPECT(loaded.scalar_type() == std::get<at::Tensor>(whole).scalar_type());
      TESSERA_EXPECT(loaded.sizes() == std::get<at::Tensor>(whole).sizes());
      TESSERA_EXPECT(loaded.to(at::kFloat).equal(std::get<at::Tensor>(whole).to(at::kFloat)));
    }
    expect_bit_equal(full_tensor(std::get<at::Tensor>(state.model.at("scalar"))), scalar);
    expect_equal(std::get<std::string>(state.user.at("text")), std::string("\0\n\"\\", 4));
  });
}

TEST_CASE("one tensor under two names, and lazily conjugated ones") {
  const TempFolder folder;
  const auto path = folder.path("c");
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto tied = distribute_tensor(numbers(5, at::kFloat), mesh, {Shard(0)});
    const auto complex = at::view_as_complex(at::randn({20000, 2}, make_generator(1)));
    dcp::save(path, {.model = {{"in", tied}, {"out", tied}, {"conjugated", at::conj(complex)}}});
    const auto again = distribute_tensor(at::zeros({5, 3}), mesh, {Shard(1)});
    const auto loaded = at::zeros({20000}, at::kComplexFloat);
    dcp::State state{.model = {{"in", again}, {"out", again}, {"conjugated", at::conj(loaded)}}};
    dcp::load(path, state);
    expect_bit_equal(full_tensor(again), numbers(5, at::kFloat));
    TESSERA_EXPECT(loaded.equal(complex));
  });
}

}  // namespace tessera::testing
