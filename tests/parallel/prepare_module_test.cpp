#include "parallel/prepare_module.h"

#include <ATen/TensorOperators.h>

#include "base/error.h"
#include "nn/modules.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Notes what it is given: x, an optional mask and a pair of tables.
struct ProbeImpl : torch::nn::Module {
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x, std::optional<at::Tensor> mask,
                                            std::vector<at::Tensor> tables) {
    seen = {x};
    if (mask) {
      seen.push_back(*mask);
    }
    seen.insert(seen.end(), tables.begin(), tables.end());
    return {x, tables[1]};
  }
  std::vector<at::Tensor> seen;
};
TESSERA_MODULE(Probe);

/// A Probe of three tensors, which it names.
struct NamedProbeImpl : torch::nn::Module, NamedInputs {
  std::vector<std::string> input_names() const override { return {"x", "mask", "positions"}; }
  at::Tensor forward(at::Tensor x, std::optional<at::Tensor> mask, int64_t /*heads*/, at::Tensor positions) {
    seen = {x, mask.value_or(at::Tensor()), positions};
    return x;
  }
  std::vector<at::Tensor> seen;
};
TESSERA_MODULE(NamedProbe);

std::string layout(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? to_string(placements(tensor)) : "plain";
}

}  // namespace

TEST_CASE("inputs and outputs are placed by position", "[parallel]") {
  run_ranks(3, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    Probe probe;
    parallelize_module(
        probe, mesh,
        PrepareModuleInputOutput({.input = {.input_layouts = {Shard(1), std::nullopt, Replicate(), Replicate()},
                                            .desired_input_layouts = {Replicate(), std::nullopt, Shard(0), Shard(1)}},
                                  .output = {.output_layouts = {Replicate(), std::nullopt},
                                             .desired_output_layouts = {Shard(0), std::nullopt}}}));
    const auto x = make_input(1, {4, 5}), table = make_input(2, {4, 3});
    const auto own_x = to_local(redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)}));
    const auto [first, second] = probe(own_x, std::make_optional(table), std::vector{table, table});
    const auto& seen = probe->seen;
    expect_equal(layout(seen[0]), "(Replicate())");
    expect_bit_equal(to_local(seen[0]), x);
    expect_equal(layout(seen[1]), "plain");
    expect_equal(layout(seen[2]), "(Shard(0))");
    expect_equal(layout(seen[3]), "(Shard(1))");
    expect_bit_equal(seen[3], table);
    expect_equal(layout(first), "plain");
    expect_bit_equal(full_tensor(from_local(first, mesh, {Shard(0)}, {.shape = std::vector<int64_t>{4, 5}})), x);
    expect_equal(layout(second), "(Shard(1))");

    expect_equal(error_text([&] {
                   probe(own_x, std::nullopt, std::vector{table, table});
                 }),
                 std::string("PrepareModuleInputOutput(the module itself): forward's inputs hold 3 tensors, but there "
                             "are 4 input_layouts. Give one for each defined tensor, std::nullopt for those to leave "
                             "alone"));
  });
}

TEST_CASE("inputs are placed by the names that their module gives them, and by position before those", "[parallel]") {
  const bool by_position = GENERATE(false, true);
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"tp"});
    NamedProbe probe;
    PrepareModuleInputOptions options{
        .input_kwarg_layouts = {{"positions", Replicate()}, {"x", Shard(1)}},
        .desired_input_kwarg_layouts = {{"positions", Shard(0)}, {"x", Replicate()}},
    };
    if (by_position) {
      options = {.input_layouts = {Shard(1)},
                 .desired_input_layouts = {Replicate()},
                 .input_kwarg_layouts = {{"positions", Replicate()}},
                 .desired_input_kwarg_layouts = {{"positions", Shard(0)}}};
    }
    parallelize_module(probe, mesh, PrepareModuleInput(options));
    const auto x = make_input(1, {4, 5}), positions = make_input(2, {4, 3});
    const auto own_x = to_local(redistribute(from_local(x, mesh, {Replicate()}), {Shard(1)}));
    probe(own_x, std::make_optional(positions), 2, positions);
    expect_bit_equal(to_local(probe->seen[0]), x);
    expect_equal(layout(probe->seen[1]), "plain");
    expect_equal(layout(probe->seen[2]), "(Shard(0))");
    expect_bit_equal(full_tensor(probe->seen[2]), positions);
    expect_equal(error_text([&] { probe(own_x, std::nullopt, 2, positions); }),
                 std::string("PrepareModuleInput(the module itself): forward's inputs hold 2 tensors, but there are 3 "
                             "input_names(). Give one for each defined tensor, std::nullopt for those to leave alone"));
  });
}

TEST_CASE("names that a module does not have change nothing", "[parallel]") {
  run_ranks(1, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {1}, {"tp"});
    const auto error_of = [&](auto& module, PrepareModuleInputOptions options) {
      return error_text([&] { parallelize_module(module, mesh, PrepareModuleInput(std::move(options))); });
    };
    NamedProbe named;
    Probe nameless;
    const NamedLayouts x{{"x", Shard(0)}}, typo{{"position", Shard(0)}};
    expect_equal(
        error_of(named, {.input_kwarg_layouts = typo, .desired_input_kwarg_layouts = typo}),
        std::string("PrepareModuleInput(the module itself): the module has no input 'position'; its inputs are "
                    "x, mask, positions. Is 'positions' meant?"));
    expect_equal(error_of(named, {.input_layouts = {Shard(0)},
                                  .desired_input_layouts = {Shard(0)},
                                  .input_kwarg_layouts = x,
                                  .desired_input_kwarg_layouts = x}),
                 std::string("PrepareModuleInput(the module itself): input 'x' has a layout by its name and one by its "
                             "position, 0; give one"));
    TESSERA_EXPECT(error_of(nameless, {.input_kwarg_layouts = x, .desired_input_kwarg_layouts = x})
                       .find("ProbeImpl does not name its inputs") != std::string::npos);
    expect_equal(error_of(named, {.input_kwarg_layouts = x, .desired_input_kwarg_layouts = typo}),
                 std::string("PrepareModuleInput: 'position' is in only one of input_kwarg_layouts and "
                             "desired_input_kwarg_layouts; give both"));
    TESSERA_EXPECT(!hook_point(*named, "test").has_hooks() && !hook_point(*nameless, "test").has_hooks());
  });
}

TEST_CASE("a plain module between cut ones", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      nn::Sequential stage;
      stage->push_back("relu", nn::ReLU());
      parallelize_module(
          stage, mesh,
          {{"", PrepareModuleInput(
                    {.input_layouts = {Shard(0)}, .desired_input_layouts = {Shard(1)}, .use_local_output = true})},
           {"relu",
            PrepareModuleOutput(
                {.output_layouts = {Shard(1)}, .desired_output_layouts = {Replicate()}, .use_local_output = false})}});
      const auto x = make_input(1, {5, 6}).set_requires_grad(true);
      const auto rows = redistribute(from_local(x, mesh, {Replicate()}), {Shard(0)});
      const auto out = stage(to_local(rows));
      expect_bit_equal(full_tensor(out).detach(), x.detach().relu());
      (full_tensor(out) * x.detach()).sum().backward();
      expect_close(x.grad(), x.detach().relu());
    });
  }
}

TEST_CASE("without layouts the inputs, or the outputs, are left alone", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto x = make_input(1, {4, 5});
    nn::ReLU outputs_only, inputs_only;
    parallelize_module(outputs_only, mesh,
                       PrepareModuleInputOutput({.input = {},
                                                 .output = {.output_layouts = {Replicate()},
                                                            .desired_output_layouts = {Shard(0)},
                                                            .use_local_output = false}}));
    expect_equal(layout(outputs_only(x)), "(Shard(0))");
    parallelize_module(
        inputs_only, mesh,
        PrepareModuleInputOutput({.input = {.input_layouts = {Replicate()}, .desired_input_layouts = {Shard(0)}},
                                  .output = {.output_layouts = {}, .desired_output_layouts = {}}}));
    expect_equal(layout(inputs_only(x)), "(Shard(0))");
  });
}

TEST_CASE("local tensors that were moved may be written in place", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::ReLU relu;
    parallelize_module(relu, mesh,
                       PrepareModuleOutput({.output_layouts = {Shard(0)}, .desired_output_layouts = {Replicate()}}));
    const auto x = make_input(1, {4, 5}).set_requires_grad(true);
    const auto rows = to_local(redistribute(from_local(x, mesh, {Replicate()}), {Shard(0)}));
    auto out = relu(rows);
    out.mul_(3);
    expect_close(out.detach(), x.detach().relu() * 3);
    out.sum().backward();
    expect_close(x.grad(), x.detach().gt(0).to(at::kDouble) * 3);
    // One that was not moved is the caller's own, also where no gradient says so.
    nn::Identity same;
    parallelize_module(same, mesh,
                       PrepareModuleOutput({.output_layouts = {Shard(0)}, .desired_output_layouts = {Shard(0)}}));
    expect_throws<std::exception>([&] { same(rows).mul_(3); }, "a view");
  });
}

TEST_CASE("errors of outputs call them so", "[parallel]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::ReLU relu;
    parallelize_module(relu, mesh,
                       PrepareModuleOutput({.output_layouts = {Shard(0)}, .desired_output_layouts = {Shard(2)}}));
    expect_equal(error_text([&] {
                   relu(make_input(1, {4, 5}));
                 }),
                 std::string("PrepareModuleOutput(the module itself): Shard(2) on a tensor of 2 dims; dim must be in "
                             "[-2, 1]"));
    expect_equal(error_text([&] {
                   relu(make_input(1, {rank + 1, 5, 3}));
                 }),
                 std::string("PrepareModuleOutput(the module itself): the ranks' plain outputs have [1, 2] in dim 0, "
                             "which is not how 3 is cut: [2, 1]. Pass shards as torch.chunk makes them, or DTensors"));
    const auto other = init_device_mesh(at::kCPU, {2}, {"dp"});
    expect_throws<ValueError>(
        [&] {
          relu(distribute_tensor(make_input(1, {4, 5, 3}), other, {Shard(0)}));
        },
        "PrepareModuleOutput(the module itself): an output is Double[4, 5, 3]");
  });
}

TEST_CASE("layouts that do not fit each other", "[parallel]") {
  expect_equal(error_text([] { PrepareModuleInput({.input_layouts = {Shard(1)}, .desired_input_layouts = {}}); }),
               std::string("PrepareModuleInput: 1 input_layouts, but 0 desired_input_layouts; give both one entry for "
                           "each tensor"));
  expect_equal(error_text([] {
                 PrepareModuleOutput(
                     {.output_layouts = {Shard(1), std::nullopt}, .desired_output_layouts = {Replicate(), Shard(0)}});
               }),
               std::string("PrepareModuleOutput: tensor 1 has std::nullopt in output_layouts and Shard(0) in "
                           "desired_output_layouts; give both, or std::nullopt twice"));
}

}  // namespace tessera::testing
