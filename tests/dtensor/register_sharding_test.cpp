// A program's own ops on DTensors: smooth(x), which adds up neighbours along the last dim, with a backward that is an
// op of its own, and weigh(x, w), which contracts the rows of both.

#include "dtensor/register_sharding.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/propagation/sharding_rule.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using OneTensorOp = at::Tensor(const at::Tensor&);

at::Tensor call(const char* name, const at::Tensor& x) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<OneTensorOp>().call(x);
}

at::Tensor smooth(const at::Tensor& x) {
  auto y = x.clone();
  y.narrow(-1, 1, x.size(-1) - 1).add_(x.narrow(-1, 0, x.size(-1) - 1));
  return y;
}

at::Tensor smooth_backward(const at::Tensor& gradient) {
  auto result = gradient.clone();
  result.narrow(-1, 0, gradient.size(-1) - 1).add_(gradient.narrow(-1, 1, gradient.size(-1) - 1));
  return result;
}

struct Smooth : torch::autograd::Function<Smooth> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    const at::AutoDispatchBelowAutograd guard;
    return call("own_ops::smooth", x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {call("own_ops::smooth_backward", gradients[0])};
  }
};

at::Tensor smooth_with_gradient(const at::Tensor& x) {
  return Smooth::apply(x);
}

at::Tensor like(const at::Tensor& x) {
  return at::empty_like(x);
}

at::Tensor weigh(const at::Tensor& x, const at::Tensor& weights) {
  return weights.mm(x);
}

at::Tensor weigh_meta(const at::Tensor& x, const at::Tensor& weights) {
  return at::empty({weights.size(0), x.size(1)}, x.options());
}

at::Tensor twice(const at::Tensor& x) {
  return x * 2;
}

/// As a kernel that knows plain tensors only.
at::Tensor twice_in_memory(const at::Tensor& x) {
  auto y = at::empty_like(x, at::MemoryFormat::Contiguous);
  const auto from = x.contiguous();
  for (int64_t i = 0; i < x.numel() && !x.is_meta(); ++i) {
    y.mutable_data_ptr<float>()[i] = 2 * from.const_data_ptr<float>()[i];
  }
  return y;
}

at::Tensor twice_by_value(at::Tensor x) {  // NOLINT(performance-unnecessary-value-param): what the test is about
  return twice_in_memory(x);
}

at::Tensor& add_one(at::Tensor& x) {
  return x.add_(1);
}

TORCH_LIBRARY(own_ops, library) {
  library.def("smooth(Tensor x) -> Tensor");
  library.def("smooth_backward(Tensor x) -> Tensor");
  library.def("weigh(Tensor x, Tensor weights) -> Tensor");
  for (const char* name : {"late", "replaced", "many", "far", "without_meta", "without_meta.second"}) {
    library.def((std::string(name) + "(Tensor x) -> Tensor").c_str());
  }
  library.def("of_another_device(Tensor x) -> Tensor");
  library.def("add_one(Tensor(a!) x) -> Tensor(a!)");
  library.def("of_all_backends(Tensor x) -> Tensor",
              torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(twice_in_memory)));
  library.def("by_value(Tensor x) -> Tensor",
              torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(twice_by_value)));
  library.def("of_parts(Tensor x) -> Tensor", &twice);
}

TORCH_LIBRARY_IMPL(own_ops, CPU, library) {
  library.impl("smooth", &smooth);
  library.impl("smooth_backward", &smooth_backward);
  library.impl("weigh", &weigh);
  for (const char* name : {"late", "replaced", "many", "far", "without_meta", "without_meta.second"}) {
    library.impl(name, &twice);
  }
  library.impl("add_one", &add_one);
}

TORCH_LIBRARY_IMPL(own_ops, CUDA, library) {
  library.impl("of_another_device", &twice);
}

TORCH_LIBRARY_IMPL(own_ops, Meta, library) {
  library.impl("smooth", &like);
  library.impl("of_another_device", &like);
  library.impl("smooth_backward", &like);
  library.impl("weigh", &weigh_meta);
  for (const char* name : {"late", "replaced", "many", "far"}) {
    library.impl(name, &like);
  }
  library.impl("add_one", &add_one);
}

TORCH_LIBRARY_IMPL(own_ops, Autograd, library) {
  library.impl("smooth", &smooth_with_gradient);
}

Strategies all_dims_but_the_last(const OpCall& call) {
  Strategies strategies;
  for (int64_t dim = 0; dim + 1 < call.operands[0].ndim(); ++dim) {
    strategies.push_back({.operands = {Shard(dim)}, .outputs = {Shard(dim)}});
  }
  return strategies;
}

Strategies all_dims(const OpCall& call) {
  auto strategies = all_dims_but_the_last(call);
  strategies.push_back({.operands = {Shard(-1)}, .outputs = {Shard(-1)}});
  return strategies;
}

}  // namespace

TEST_CASE("a program's own op runs on shards where its strategies allow it, gradients included", "[dtensor]") {
  register_sharding("own_ops::smooth", all_dims_but_the_last);
  register_sharding("own_ops::smooth_backward", all_dims_but_the_last);
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [=](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks});
      for (const auto& placement :
           {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Shard(2))}) {
        const auto values = ramp({5, 2, 3});
        const auto plain = values.clone().requires_grad_();
        const auto x = distribute_tensor(values, mesh, {placement}).requires_grad_();
        const auto y = call("own_ops::smooth", x);
        if (placement.is_shard(2)) {
          TESSERA_EXPECT(!placements(y)[0].is_shard(2));  // moved: each rank has neighbours
        } else {
          expect_equal(to_string(placements(y)), to_string(Placements{placement}));
        }
        const auto expected = call("own_ops::smooth", plain);
        expect_bit_equal(full_tensor(y.detach()), expected.detach());
        (y * y).sum().backward();
        (expected * expected).sum().backward();
        expect_bit_equal(full_tensor(x.grad()), plain.grad());
      }
    });
  }
}

TEST_CASE("a contracted dim may stay cut: the output is a pending sum", "[dtensor]") {
  register_sharding("own_ops::weigh", [](const OpCall&) -> Strategies {
    return {{.operands = {Shard(0), Shard(-1)}, .outputs = {Partial()}},
            {.operands = {Shard(1), Replicate()}, .outputs = {Shard(1)}}};
  });
  run_ranks(4, [](int) {
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("own_ops::weigh", "")
                        .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
    const auto mesh = init_device_mesh(at::kCPU, {2, 2});
    const auto x = distribute_tensor(ramp({5, 3}), mesh, {Shard(0), Shard(1)});
    const auto weights = distribute_tensor(ramp({2, 5}), mesh, {Shard(1), Replicate()});
    const auto y = op.call(x, weights);
    expect_equal(to_string(placements(y)), "(Partial(Sum), Shard(1))");
    expect_bit_equal(full_tensor(y), ramp({2, 5}).mm(ramp({5, 3})));
  });
}

TEST_CASE("an own op that writes its operand", "[dtensor]") {
  register_sharding("own_ops::add_one", all_dims);
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("own_ops::add_one", "").typed<at::Tensor&(at::Tensor&)>();
    auto x = distribute_tensor(ramp({4, 2}), mesh, {Shard(0)});
    op.call(x);
    expect_equal(to_string(placements(x)), "(Shard(0))");
    expect_bit_equal(full_tensor(x), ramp({4, 2}) + 1);
  });
}

TEST_CASE("an op that the device has no kernel for is refused on every rank, also on those without elements",
          "[dtensor]") {
  register_sharding("own_ops::of_another_device", all_dims);
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3});
    expect_throws<NotImplementedError>(
        [&] {
          call("own_ops::of_another_device", distribute_tensor(ramp({2, 3}), mesh, {Shard(0)}));
        },
        "own_ops::of_another_device: libtorch has no kernel of it for CPU");
    // Without data: what there is a shape for, there is.
    const auto shapes = distribute_tensor(at::empty({2, 3}, at::kMeta), mesh, {Shard(0)});
    expect_equal(to_string(placements(call("own_ops::of_another_device", shapes))), "(Shard(0))");
  });
}

TEST_CASE("without a kernel for sizes an own op runs on whole tensors", "[dtensor]") {
  register_sharding("own_ops::without_meta", all_dims);
  register_sharding("own_ops::without_meta.second", all_dims);
  run_ranks(2, [](int) {
    const auto y =
        call("own_ops::without_meta", distribute_tensor(ramp({4}), init_device_mesh(at::kCPU, {2}), {Shard(0)}));
    expect_equal(to_string(placements(y)), "(Replicate())");
    expect_bit_equal(full_tensor(y), ramp({4}) * 2);
  });
}

TEST_CASE("strategies count from the next call on, on every thread that runs already", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto x = distribute_tensor(ramp({4, 4}), init_device_mesh(at::kCPU, {2}), {Shard(1)});
    expect_throws<NotImplementedError>([&] { call("own_ops::late", x); }, "or register_sharding() for it");
    barrier(default_group());
    register_sharding("own_ops::late", all_dims);  // by each rank
    expect_equal(to_string(placements(call("own_ops::late", x))), "(Shard(1))");

    if (rank == 0) {
      register_sharding("own_ops::replaced", all_dims);
    }
    barrier(default_group());
    expect_equal(to_string(placements(call("own_ops::replaced", x))), "(Shard(1))");
    barrier(default_group());
    if (rank == 0) {
      register_sharding("own_ops::replaced", all_dims_but_the_last);
    }
    barrier(default_group());
    const auto y = call("own_ops::replaced", x);
    expect_equal(to_string(placements(y)), "(Shard(0))");
    expect_bit_equal(full_tensor(y), ramp({4, 4}) * 2);
  });
}

TEST_CASE("the ops that have a rule are listed, a program's own among them", "[dtensor]") {
  register_sharding("own_ops::smooth", all_dims_but_the_last);
  const auto names = ops_with_rules();
  CHECK(std::ranges::is_sorted(names));
  CHECK(std::ranges::count(names, "aten::mm") == 1);
  CHECK(std::ranges::count(names, "own_ops::smooth") == 1);
}

TEST_CASE("an own op with one kernel for all backends", "[dtensor]") {
  run_ranks(3, [](int) {
    register_sharding("own_ops::of_all_backends", all_dims);  // by each rank
    const auto x = distribute_tensor(ramp({4, 4}), init_device_mesh(at::kCPU, {3}), {Shard(1)});
    for (int i = 0; i < 2; ++i) {
      const auto y = call("own_ops::of_all_backends", x);
      expect_equal(to_string(placements(y)), "(Shard(1))");
      expect_bit_equal(full_tensor(y), ramp({4, 4}) * 2);
    }
  });
}

TEST_CASE("an own op whose kernel takes tensors by value", "[dtensor]") {
  run_ranks(2, [](int) {
    register_sharding("own_ops::by_value", all_dims);
    const auto x = distribute_tensor(ramp({4, 4}), init_device_mesh(at::kCPU, {2}), {Shard(1)});
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("own_ops::by_value", "").typed<at::Tensor(at::Tensor)>();
    const auto y = op.call(x);
    expect_equal(to_string(placements(y)), "(Shard(1))");
    expect_bit_equal(full_tensor(y), ramp({4, 4}) * 2);
  });
}

TEST_CASE("writes of an own op count as writes", "[dtensor]") {
  register_sharding("own_ops::add_one", all_dims);
  run_ranks(2, [](int) {
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("own_ops::add_one", "").typed<at::Tensor&(at::Tensor&)>();
    auto x = distribute_tensor(ramp({3}), init_device_mesh(at::kCPU, {2}), {Shard(0)}).requires_grad_();
    auto y = x * 1;
    const auto loss = (y * y).sum();
    {
      const at::NoGradGuard no_grad;
      op.call(y);
    }
    expect_throws<c10::Error>([&] { loss.backward(); }, "modified by an inplace operation");
  });
}

TEST_CASE("what cannot be a rule is refused", "[dtensor]") {
  CHECK_THROWS_WITH(register_sharding("own_ops::of_parts", all_dims),
                    Catch::Matchers::ContainsSubstring("register those ops"));
  CHECK_THROWS_AS(register_sharding("own_ops::smoth", all_dims), ValueError);
  CHECK_THROWS_WITH(register_sharding("own_ops::smoth", all_dims),
                    Catch::Matchers::ContainsSubstring("\"own_ops::smoth\"): there is no such op"));
  CHECK_THROWS_AS(register_sharding("smooth", all_dims), ValueError);
  CHECK_THROWS_AS(register_sharding("own_ops::smooth.out", all_dims), ValueError);
  CHECK_THROWS_AS(register_sharding("own_ops::smooth", nullptr), ValueError);
  CHECK_THROWS_AS(register_sharding("aten::add.Tensor", all_dims), ValueError);
  CHECK_THROWS_WITH(register_sharding("aten::add.Tensor", all_dims),
                    Catch::Matchers::ContainsSubstring("aten::add.Tensor has a sharding rule of the library"));
}

TEST_CASE("strategies that do not fit the call are refused on every rank", "[dtensor]") {
  register_sharding("own_ops::many", [](const OpCall&) -> Strategies {
    return {{.operands = {Shard(0), Shard(0)}, .outputs = {Shard(0)}}};
  });
  register_sharding("own_ops::far",
                    [](const OpCall&) -> Strategies { return {{.operands = {Shard(0)}, .outputs = {Shard(2)}}}; });
  run_ranks(2, [](int) {
    const auto x = distribute_tensor(ramp({4, 4}), init_device_mesh(at::kCPU, {2}), {Shard(0)});
    expect_throws<ValueError>([&] { call("own_ops::many", x); },
                              "has placements for 2 operands and 1 outputs; this call has 1 and 1");
    expect_throws<ValueError>([&] { call("own_ops::far", x); }, "has Shard(2) for output 0, which has 2 dim(s)");
  });
}

}  // namespace tessera
