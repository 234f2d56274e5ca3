#include "parallel/parallelize_module.h"

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include "base/error.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/replicate.h"
#include "nn/modules.h"
#include "parallel/linear_styles.h"
#include "parallel/prepare_module.h"
#include "parallel/sequence_parallel.h"
#include "parallel/style_tensors.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// x * table, an own type of module.
struct ScaleImpl : torch::nn::Module {
  explicit ScaleImpl(int64_t dim) { table = register_parameter("table", at::linspace(1, 2, dim, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return x * table; }
  at::Tensor table;
};
TESSERA_MODULE(Scale);

/// A style for it: features are cut, inputs and outputs are whole and plain.
class CutScale : public ParallelStyle {
 public:
  std::string name() const override { return "CutScale"; }
  void apply(const StyleTarget& target) const override {
    distribute_style_parameter(*this, target, target.module, "table", Shard(0));
    auto& point = hook_point(target.module, describe(target));
    point.register_forward_pre_hook([mesh = target.mesh, where = describe(target)](HookPoint&, TensorRefs inputs) {
      *inputs[0] = style_input(*inputs[0], mesh, Replicate(), Shard(-1), {.where = where});
    });
    point.register_forward_hook([where = describe(target)](HookPoint&, TensorRefs outputs) {
      *outputs[0] = style_output(*outputs[0], Replicate(), {.where = where});
    });
  }
};

/// Of each parameter; empty for a plain one.
std::vector<Placements> placements_of(const torch::nn::Module& module) {
  std::vector<Placements> all;
  for (const auto& parameter : module.parameters()) {
    all.push_back(is_dtensor(parameter) ? placements(parameter) : Placements());
  }
  return all;
}

}  // namespace

TEST_CASE("a parameter keeps its identity, and an optimizer made before stays valid", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    MLP mlp(3, MLPOptions{.dim_multiplier = 2});
    fill_in_double(*mlp, 1);
    torch::optim::SGD optimizer(mlp->parameters(), 0.1);
    const auto weight = mlp->in_proj->weight;
    const auto before = weight.detach().clone();
    parallelize_module(mlp, mesh, {{"in_proj", ColwiseParallel()}, {"out_proj", RowwiseParallel()}});
    TESSERA_EXPECT(weight.is_same(mlp->in_proj->weight));
    TESSERA_EXPECT(is_dtensor(weight));
    weighted_loss(mlp(make_input(1, {4, 3}))).backward();
    optimizer.step();
    expect_close(full_tensor(weight.detach()), before - 0.1 * full_tensor(weight.grad()));
    TESSERA_EXPECT(weight.grad().abs().sum().item<double>() > 0);
  });
}

TEST_CASE("rank 0 has the values that count, unless no one has", "[parallel]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto make = [&] {
      nn::Linear linear(torch::nn::LinearOptions(2, 4).bias(false));
      const torch::NoGradGuard no_grad;
      linear->weight.fill_(rank + 1);
      return linear;
    };
    auto sent = make(), own = make();
    parallelize_module(sent, mesh, ColwiseParallel());
    expect_equal(to_local(sent->weight)[0][0].item<float>(), 1.f);
    parallelize_module(own, mesh, ColwiseParallel(), {.src_data_rank = std::nullopt});
    expect_equal(to_local(own->weight)[0][0].item<float>(), static_cast<float>(rank + 1));
  });
}

TEST_CASE("hooked stock layers and a style of one's own", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
      const auto make = [] {
        nn::Sequential model;
        model->push_back("up", hooked(torch::nn::Linear(5, 7)));
        model->push_back("down", hooked(torch::nn::Linear(7, 5)));
        model->push_back("scale", Scale(5));
        fill_in_double(*model, 3);
        return model;
      };
      auto reference = make(), sharded = make();
      parallelize_module(sharded, mesh,
                         {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}, {"scale", CutScale()}});
      train_and_compare({.reference = *reference,
                         .sharded = *sharded,
                         .run_reference = [&](const at::Tensor& x) { return reference(x); },
                         .run_sharded = [&](const at::Tensor& x) { return sharded(x); }},
                        make_input(1, {4, 5}));
    });
  }
}

TEST_CASE("a module under several names is cut once", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::Linear shared(4, 4);
    nn::Sequential model(shared, shared);
    parallelize_module(model, mesh, {{"*", ColwiseParallel({.output_layouts = Replicate()})}});
    expect_equal(to_string(placements(shared->weight)), "(Shard(0))");
    expect_equal(model(at::ones({2, 4})).sizes().vec(), std::vector<int64_t>{2, 4});
  });
}

TEST_CASE("what a plan must not say", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const auto stack = make_mlp_stack(3);
    const auto error = [&](const ParallelPlan& plan) {
      return error_text([&] { parallelize_module(stack, mesh, plan); });
    };
    expect_equal(error({{"*.in_porj", ColwiseParallel()}}),
                 std::string("parallelize_module: no module of tessera::nn::SequentialImpl matches \"*.in_porj\"; "
                             "close ones: \"*.in_proj\""));
    expect_equal(error({{"5.in_proj", ColwiseParallel()}}),
                 std::string("parallelize_module: no module of tessera::nn::SequentialImpl matches \"5.in_proj\"; "
                             "close ones: \"0.in_proj\", \"1.in_proj\", \"2.in_proj\""));
    expect_equal(error({{"encoder", ColwiseParallel()}}),
                 std::string("parallelize_module: no module of tessera::nn::SequentialImpl matches \"encoder\"; its "
                             "children are: 0, 1, 2"));
    expect_equal(
        error({{"0.in_proj", ColwiseParallel()}, {"*.in_proj", RowwiseParallel()}}),
        std::string("parallelize_module: \"0.in_proj\" would get RowwiseParallel by \"*.in_proj\", but has "
                    "ColwiseParallel by an earlier entry of the plan; one style a module (PrepareModuleInputOutput "
                    "places both inputs and outputs)"));
    expect_throws<KeyError>([&] { parallelize_module(stack, mesh, {{"0.x", ColwiseParallel()}}); }, "no module of");
    expect_throws<KeyError>(
        [&] {
          parallelize_module(nn::Linear(2, 2), mesh, {{"weight", ColwiseParallel()}});
        },
        "parallelize_module: no module of torch::nn::LinearImpl matches \"weight\"; it has no children");
    // Nothing was changed by all that.
    TESSERA_EXPECT(!is_dtensor(stack->parameters()[0]));

    parallelize_module(stack, mesh, mlp_stack_plan());
    expect_equal(
        error({{"0.in_proj", ColwiseParallel()}}),
        std::string("parallelize_module: \"0.in_proj\" would get ColwiseParallel, but has ColwiseParallel from "
                    "an earlier call; one style a module"));
  });
}

TEST_CASE("styles that place one parameter differently change nothing", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    nn::Sequential block;
    nn::Linear first(4, 4), second(4, 4);
    block->push_back("first", first);
    block->push_back("second", second);
    const auto error = [&](const ParallelPlan& plan) {
      return error_text([&] { parallelize_module(block, mesh, plan); });
    };
    const auto expect_unchanged = [&] {
      for (const auto& parameter : block->parameters()) {
        TESSERA_EXPECT(!is_dtensor(parameter));
      }
      TESSERA_EXPECT(!hook_point(*block, "test").has_hooks());
    };
    expect_equal(
        error({{"first", ColwiseParallel()}, {"", SequenceParallel()}}),
        std::string("SequenceParallel(the module itself): its \"first.weight\" would be Replicate(), but "
                    "ColwiseParallel(\"first\") of the same plan makes it Shard(0). Use one style a parameter, "
                    "also for tied ones"));
    expect_unchanged();
    tie_parameter(*second, "weight", first->weight);
    expect_equal(
        error({{"first", ColwiseParallel()}, {"second", RowwiseParallel()}}),
        std::string("RowwiseParallel(\"second\"): its \"weight\" would be Shard(1), but "
                    "ColwiseParallel(\"first\") of the same plan makes it Shard(0). Use one style a parameter, "
                    "also for tied ones"));
    expect_unchanged();
    parallelize_module(block, mesh, {{"*", ColwiseParallel()}});
  });
}

TEST_CASE("parameters of a unit are refused, also where the unit placed them as the style would", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto expect_refused = [&](auto& model, const ParallelPlan& plan) {
      const auto before = placements_of(*model);
      expect_throws<ValueError>([&] { parallelize_module(model, mesh, plan); },
                                "belongs to a unit of fully_shard or replicate already; call parallelize_module before "
                                "fully_shard and replicate");
      TESSERA_EXPECT(placements_of(*model) == before);
    };
    nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
    nn::Sequential layers(nn::Linear(4, 4), norm);
    nn::Embedding table(6, 4);
    fully_shard(layers, {.mesh = mesh});
    fully_shard(table, {.mesh = mesh});
    expect_refused(layers, {{"0", ColwiseParallel()}});
    expect_refused(layers, {{"0", RowwiseParallel()}});
    expect_refused(layers, {{"1", SequenceParallel()}});
    expect_refused(table, RowwiseParallel());
    expect_refused(norm, SequenceParallel());
    nn::Sequential copies(nn::Linear(4, 4), nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    replicate(copies, {.mesh = mesh});
    expect_refused(copies, {{"1", SequenceParallel()}});
    // Plain between the outermost unit's forward and its backward.
    const auto output = copies(make_input(1, {2, 4}).to(at::kFloat));
    TESSERA_EXPECT(!is_dtensor(copies->parameters()[0]));
    expect_refused(copies, {{"0", ColwiseParallel()}});
    output.sum().backward();
  });
}

TEST_CASE("a plan needs one axis", "[parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    expect_equal(error_text([&] { parallelize_module(nn::Linear(2, 2), mesh, ColwiseParallel()); }),
                 std::string("parallelize_module: DeviceMesh(cpu, {dp: 2, tp: 2}), but a style works along one axis; "
                             "pass mesh[\"tp\"], or whatever that axis is called"));
    nn::Linear linear(6, 4);
    parallelize_module(linear, mesh["tp"], ColwiseParallel());
    expect_equal(to_local(linear->weight).sizes().vec(), std::vector<int64_t>{2, 6});
  });
}

}  // namespace tessera::testing
