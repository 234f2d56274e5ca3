// The parameters of a unit by themselves: where they lie, what is to hold of them, and what a rank sends of their
// gradients. No modules and no steps of a unit.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <vector>

#include "base/error.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "fully_shard/param/unit_params.h"
#include "fully_shard/reduce/flat_gradient.h"
#include "fully_shard/reduce/reduce_scatter_layout.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

std::vector<float> values_of(const at::Tensor& tensor) {
  const auto flat = tensor.detach().contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel()};
}

/// Over two ranks a weight [5, 3] with the values 1 to 15, and a bias [2] of 16 and 17.
struct Two {
  static ParamInfo named(const at::Tensor& tensor, const char* name) {
    return {.tensor = tensor,
            .origin = std::make_shared<ParameterOrigin>(ParameterOrigin{name, "Layer"}),
            .gather = {.dtype = at::kFloat}};
  }

  at::Tensor weight = at::arange(1.f, 16.f).view({5, 3}).requires_grad_();
  at::Tensor bias = at::arange(16.f, 18.f).requires_grad_();
  UnitContext context{.api = "fully_shard",
                      .axes = DataParallelAxes::sharded(init_device_mesh(at::kCPU, {2}, {"dp"})),
                      .device = at::kCPU,
                      .shard_options = at::kCPU,
                      .reduce_dtype = std::nullopt};
  FlatLayout layout{make_param_layout({{5, 3}, {2}}, 2), {{.dtype = at::kFloat}, {.dtype = at::kFloat}}};
  UnitParams params{{named(weight, "weight"), named(bias, "bias")},
                    layout,
                    at::zeros({layout.numel()}),
                    context,
                    /*is_alias=*/false};
};

}  // namespace

TEST_CASE("shards are views of one flat buffer with a tag, full parameters of one block", "[unit_params]") {
  run_ranks(2, [](int rank) {
    Two two;
    auto& params = two.params;
    params.tag({.unit = 65, .fault = ShardFault::Changed});
    const std::vector<float> expected = rank == 0
                                            ? std::vector<float>{1,  2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0,
                                                                 16, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 3, 0}
                                            : std::vector<float>{10, 11, 12, 13, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                                 17, 0,  0,  0,  0,  0,  0, 0, 1, 0, 1, 0, 0, 0, 3, 0};
    expect_equal(values_of(params.flat_shard()), expected);
    TESSERA_EXPECT(is_dtensor(two.weight));

    const auto pool = std::make_shared<BlockPool>(at::kCPU);
    params.take_memory(*pool);
    expect_equal(pool->stats().acquired, 128u);  // each begins on a cache line
    expect_equal(params.unsharded_bytes(), 68u);
    params.to_unsharded();
    TESSERA_EXPECT(!is_dtensor(two.weight) && params.lends_memory_to(two.weight[1]));
    params.to_sharded();
    TESSERA_EXPECT(is_dtensor(two.weight));
    expect_equal(params.unsharded_bytes(), 0u);

    params.move_to(two.layout, at::zeros({two.layout.numel()}));
    expect_equal(values_of(to_local(two.weight.detach())), std::vector<float>(rank == 0 ? 9 : 6));
  });
}

TEST_CASE("changes of shards and writes to full parameters are found, by name", "[unit_params]") {
  run_ranks(2, [](int) {
    Two two;
    auto& params = two.params;
    const auto versions = params.versions();
    params.note_gather();
    params.check_unchanged_since(versions);
    TESSERA_EXPECT(!params.has_newer_shards() && params.fault() == ShardFault::None);
    {
      const at::NoGradGuard no_grad;
      two.bias.add_(1);
    }
    TESSERA_EXPECT(params.has_newer_shards() && params.has_changed_since(versions));
    expect_throws<StateError>([&] { params.check_unchanged_since(versions); }, "parameter 'bias' of Layer was changed");

    two.weight.set_data(at::zeros({5, 3}));
    TESSERA_EXPECT(params.fault() == ShardFault::Replaced);
    expect_throws<StateError>([&] { params.check_usable(); }, "the data of parameter 'weight' of Layer were replaced");
  });
}

TEST_CASE("a rank sends the gradients that it has, zeros for others, and two flags for each", "[unit_params]") {
  run_ranks(2, [](int rank) {
    Two two;
    const auto params = two.params.all();
    ReduceScatterLayout message(params, two.context);
    expect_equal(message.numel(), 32);
    two.weight.mutable_grad() = at::arange(1.f, 16.f).view({5, 3});
    message.collect(params);
    const auto buffer = at::full({64}, -1.f);
    message.copy_to(buffer);
    expect_equal(values_of(buffer), std::vector<float>{1,  2,  3,  4,  5,  6,  7, 8, 9, 0, 0, 0, 0, 0, 0, 0,  //
                                                       0,  0,  0,  0,  0,  0,  0, 0, 0, 0, 1, 0, 0, 0, 0, 0,  //
                                                       10, 11, 12, 13, 14, 15, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  //
                                                       0,  0,  0,  0,  0,  0,  0, 0, 0, 0, 1, 0, 0, 0, 0, 0});
    const auto result = buffer.narrow(0, 32 * rank, 32);
    expect_equal(message.used(result), std::vector<bool>{true, false});
    TESSERA_EXPECT(!message.frozen_elsewhere(result));
    const auto of_another = result.clone();
    of_another[25] += 1;
    expect_equal(message.frozen_elsewhere(of_another).value(), size_t{1});

    FlatGradient flat(message.pieces(rank), message.numel(), at::TensorOptions(at::kCPU).dtype(at::kFloat));
    StreamLane stream(at::kCPU);
    for (const float times : {1.f, 2.f}) {  // a second backward adds
      flat.hand_out(result, params, message.used(result), stream);
      TESSERA_EXPECT(!two.bias.grad().defined());
      expect_equal(values_of(to_local(two.weight.grad())),
                   values_of(at::arange(1.f, 16.f).view({5, 3}).slice(0, 3 * rank, 3 + 2 * rank) * times));
    }
    TESSERA_EXPECT(!flat.can_be_result(params, at::kFloat));
    two.weight.mutable_grad() = at::Tensor();
    TESSERA_EXPECT(flat.can_be_result(params, at::kFloat) && !flat.can_be_result(params, at::kBFloat16));
    const auto* const memory = flat.ensure(params).const_data_ptr();
    TESSERA_EXPECT(flat.ensure(params).const_data_ptr() == memory);

    two.weight.set_requires_grad(false);
    TESSERA_EXPECT(!message.matches(params));
    two.context.reduce_dtype = at::kBFloat16;
    ReduceScatterLayout of_bias(params, two.context);
    two.bias.mutable_grad() = at::full({2}, 3.f);
    of_bias.collect(params);
    const auto narrow = at::full({32}, -1.f, at::kBFloat16);
    of_bias.copy_to(narrow);
    expect_equal(values_of(narrow.to(at::kFloat)),
                 std::vector<float>{3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0,  //
                                    3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0});
    expect_equal(of_bias.used(narrow.narrow(0, 0, 16)), std::vector<bool>{true});
    TESSERA_EXPECT(!of_bias.frozen_elsewhere(narrow.narrow(0, 0, 16)));
  });
}

}  // namespace tessera::testing
