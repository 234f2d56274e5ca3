// The common test models are the published ones: layers, values, inputs, units. Numbers are those of the Python models
// on a CPU.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <set>

#include "dtensor/dtensor.h"
#include "fully_shard/composable_apis.h"
#include "testing/expect.h"
#include "testing/fsdp_models/mixture_of_experts.h"
#include "testing/fsdp_models/mlp_models.h"
#include "testing/fsdp_models/module_states.h"
#include "testing/fsdp_models/transformer_with_shared_params.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/reference/dp_mesh.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

void expect_number(double actual, double expected, double tolerance = 2e-6) {
  TESSERA_CHECK(ExpectationError, std::abs(actual - expected) <= tolerance * std::max(1.0, std::abs(expected)),
                "is {:.7g}, expected {:.7g}", actual, expected);
}

int64_t num_elements(const torch::nn::Module& module) {
  int64_t elements = 0;
  for (const auto& parameter : unique_parameters(module)) {
    elements += parameter.numel();
  }
  return elements;
}

double weight_sum(const torch::nn::Module& module, const std::string& name) {
  return module.named_parameters()[name].detach().sum().item<double>();
}

/// Names of the modules that are units, "" for the model itself.
std::set<std::string> unit_name_set(torch::nn::Module& model) {
  std::set<std::string> names;
  for (const auto& item : model.named_modules()) {
    if (!composable_apis(*item.value()).empty()) {
      names.insert(item.key());
    }
  }
  return names;
}

const std::vector<const ModelClass*>& all_models() {
  static const std::vector<const ModelClass*> models{&nested_wrapped_model(), &always_wrap_nested_wrapped_model(),
                                                     &non_uniform_req_grad_model(), &mixture_of_experts(),
                                                     &transformer_with_shared_params()};
  return models;
}

}  // namespace

TEST_CASE("row 2: every model's init refuses a mode that is no enumerator") {
  run_ranks(1, [](int) {
    for (const auto* model : all_models()) {
      InitOptions options{.mesh = dp_mesh()};
      options.fsdp_init_mode = static_cast<FSDPInitMode>(7);
      expect_throws<ValueError>([&] { model->init(options); }, "FSDPInitMode(7)");
      options.fsdp_init_mode = FSDPInitMode::NO_FSDP;
      options.device_init_mode = static_cast<DEVICEInitMode>(3);
      expect_throws<ValueError>([&] { model->init(options); }, "DEVICEInitMode(3)");
    }
  });
}

TEST_CASE("row 11: TransformerWithSharedParams: elements, tensors and buffers") {
  run_ranks(2, [](int) {
    const auto with_bn = transformer_with_shared_params().init({.mesh = dp_mesh(), .deterministic = true});
    expect_equal(num_elements(*with_bn), 8427);
    expect_equal(unique_parameters(*with_bn).size(), 68u);
    expect_equal(with_bn->parameters().size(), 69u);
    expect_equal(with_bn->is_training(), false);
    const auto without = transformer_with_shared_params().init({.mesh = dp_mesh(), .add_bn = false});
    expect_equal(num_elements(*without), 8423);
    expect_equal(unique_parameters(*without).size(), 66u);
    expect_equal(without->is_training(), true);
    const auto buffers = without->named_buffers();
    expect_equal(buffers.keys(), std::vector<std::string>{"vocab_bias", "long_buffer"});
    TESSERA_EXPECT(buffers["vocab_bias"].scalar_type() == at::kFloat);
    TESSERA_EXPECT(buffers["long_buffer"].scalar_type() == at::kLong);
  });
}

TEST_CASE("row 12: TransformerWithSharedParams: values are those of Python, inputs equal on all ranks") {
  run_ranks(2, [](int) {
    const InitOptions options{.mesh = dp_mesh(), .deterministic = true};
    const auto model = transformer_with_shared_params().init(options);
    expect_number(weight_sum(*model, "embed_tokens.weight"), 14.911797);
    expect_number(weight_sum(*model, "output_proj.bias"), 0.087547);
    const auto again = transformer_with_shared_params().init(options);
    for (const auto& item : model->named_parameters()) {
      expect_bit_equal(again->named_parameters()[item.key()].detach(), item.value().detach());
    }
    const auto input = model->get_input(at::kCPU);
    expect_equal(input[0].sizes().vec(), std::vector<int64_t>{6, 2});
    expect_equal(input[1].sizes().vec(), std::vector<int64_t>{4, 2});
    expect_equal(input[0][5][1].item<int64_t>(), 11);
    const auto output = model->forward(input);
    expect_equal(output.sizes().vec(), std::vector<int64_t>{4, 2, 23});
    expect_number(model->get_loss(input, output).item<double>(), 5.74779, 1e-5);
  });
}

TEST_CASE("row 13: TransformerWithSharedParams: one unit a layer and the root; options are not changed") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicas", "shards"});
    InitOptions options{.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true};
    options.fsdp_options.reshard_after_forward = true;
    const auto model = transformer_with_shared_params().init(options);
    expect_equal(unit_name_set(*model),
                 std::set<std::string>{"", "transformer.encoder.layers.0", "transformer.encoder.layers.1",
                                       "transformer.decoder.layers.0", "transformer.decoder.layers.1"});
    TESSERA_EXPECT(!options.fsdp_options.mesh && options.fsdp_options.reshard_after_forward);
    expect_equal(options.world_size(), 2);
    const auto plain = transformer_with_shared_params().init({.mesh = mesh, .deterministic = true});
    expect_equal(unit_name_set(*plain).size(), 0u);
    const auto ignored = dynamic_cast<TransformerWithSharedParamsImpl&>(*plain).get_ignored_modules();
    expect_equal(ignored.size(), 1u);
    TESSERA_EXPECT(ignored[0] == plain->children().at(1).get());
  });
}

TEST_CASE("row 14: a tied weight is one tensor under two names, and its gradient is the sum of both uses") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto plain = transformer_with_shared_params().init({.mesh = mesh, .deterministic = true});
    const auto sharded = transformer_with_shared_params().init(
        {.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true});
    for (const auto& model : {plain, sharded}) {
      const auto names = model->named_parameters();
      TESSERA_EXPECT(names["embed_tokens.weight"].is_same(names["output_proj.weight"]));
      const auto input = model->get_input(at::kCPU);
      model->run_backward(model->get_loss(input, model->forward(input)));
    }
    const auto expected = plain->named_parameters()["embed_tokens.weight"].grad();
    expect_close(sharded->named_parameters()["output_proj.weight"].grad(), expected);
    auto untied = plain->named_parameters()["embed_tokens.weight"].detach().clone().requires_grad_();
    auto& model = dynamic_cast<TransformerWithSharedParamsImpl&>(*plain);
    tie_parameter(*model.output_proj, "weight", untied);
    plain->zero_grad();
    const auto input = plain->get_input(at::kCPU);
    plain->run_backward(plain->get_loss(input, plain->forward(input)));
    expect_close(model.embed_tokens->weight.grad() + untied.grad(), expected);
    TESSERA_EXPECT(untied.grad().abs().max().item<double>() > 1e-3);
  });
}

TEST_CASE("row 15: NestedWrappedModule: values, names and units") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto model = nested_wrapped_model().init({.mesh = mesh, .deterministic = true});
    expect_equal(model->parameters().size(), 10u);
    expect_equal(num_elements(*model), 496);
    expect_number(weight_sum(*model, "module.0.weight"), -0.550717);
    expect_number(weight_sum(*model, "module.1.0.weight"), 0.992641);
    expect_number(weight_sum(*model, "module.1.1.weight"), -1.148910);
    expect_number(weight_sum(*model, "module.2.weight"), -0.509590);
    expect_number(weight_sum(*model, "module.3.weight"), -1.069495);
    const auto wrapped =
        nested_wrapped_model().init({.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true});
    expect_equal(unit_name_set(*wrapped), std::set<std::string>{"module.1", "module.1.0", "module.2"});
    expect_equal(fsdp(*wrapped->named_modules()["module.1"]).num_parameters(), 2u);
  });
}

TEST_CASE("row 16: the input is drawn anew from the rank's seed at each call") {
  run_ranks(2, [](int rank) {
    const auto model = nested_wrapped_model().init({.mesh = dp_mesh()});
    const auto input = model->get_input(at::kCPU).at(0);
    expect_number(input[0][0].item<double>(), rank == 0 ? 0.757632 : 0.614695);
    expect_bit_equal(model->get_input(at::kCPU).at(0), input);
  });
}

TEST_CASE("row 17: AlwaysWrapNestedWrappedModule: every module is a unit") {
  run_ranks(2, [](int) {
    const auto model = always_wrap_nested_wrapped_model().init(
        {.mesh = dp_mesh(), .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true});
    expect_equal(unit_name_set(*model).size(), model->modules().size());
    expect_equal(unit_name_set(*model).size(), 8u);
  });
}

TEST_CASE("row 18: NonUniformReqGradNWM: only the last layer is trained, also where a rank has none of it") {
  run_ranks(4, [](int rank) {
    const auto mesh = dp_mesh();
    const auto plain = non_uniform_req_grad_model().init({.mesh = mesh, .deterministic = true});
    std::vector<std::string> trained;
    int64_t elements = 0;
    for (const auto& item : plain->named_parameters()) {
      if (item.value().requires_grad()) {
        trained.push_back(item.key());
        elements += item.value().numel();
      }
    }
    expect_equal(trained, std::vector<std::string>{"module.2.1.weight", "module.2.1.bias"});
    expect_equal(elements, 40);
    expect_equal(num_elements(*plain), 496);

    InitOptions options{.mesh = mesh, .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true};
    const auto model = non_uniform_req_grad_model().init(options);
    wrap_unit(*model, options);
    const auto input = model->get_input(at::kCPU);
    model->run_backward(model->get_loss(input, model->forward(input)));
    for (const auto& item : model->named_parameters()) {
      expect_equal(item.value().grad().defined(), item.value().requires_grad());
    }
    // chunks of 6 rows in 4: of a layer of 6 rows the last rank has nothing
    tessera::nn::Linear small(2, 6);
    fully_shard(small, {.mesh = mesh});
    expect_equal(to_local(small->weight.detach()).numel(), rank == 3 ? 0 : 4);
    small(at::ones({1, 2})).sum().backward();
    expect_equal(small->weight.grad().defined(), true);
  });
}

TEST_CASE("row 21: MixtureOfExperts: the expert differs from rank to rank, the rest is equal") {
  run_ranks(2, [](int rank) {
    const auto mesh = dp_mesh();
    const auto model = mixture_of_experts().init({.mesh = mesh, .deterministic = true});
    expect_equal(num_elements(*model), 799);
    expect_equal(dynamic_cast<MixtureOfExpertsImpl&>(*model).num_expert_params, 288);
    expect_number(weight_sum(*model, "module.0.weight"), 3.104541);
    expect_number(weight_sum(*model, "module.1.weight"), -4.015433);
    if (rank == 0) {
      expect_number(weight_sum(*model, "module.2.weight"), -2.341118);
    }
    expect_number(weight_sum(*model, "module.3.weight"), -0.860509);
    expect_throws<ExpectationError>([&] { assert_module_states(*model, mesh); }, "differ");
    const auto all = dynamic_cast<MixtureOfExpertsImpl&>(*model).module;
    for (const size_t i : {0u, 1u, 3u}) {
      assert_module_states(*all->ptr(i), mesh);
    }
  });
}

TEST_CASE("row 22: MixtureOfExperts: the expert is a unit over its own rank alone") {
  run_ranks(2, [](int) {
    const auto model = mixture_of_experts().init(
        {.mesh = dp_mesh(), .fsdp_init_mode = FSDPInitMode::RECURSIVE, .deterministic = true});
    expect_equal(unit_name_set(*model), std::set<std::string>{"module.1", "module.2"});
    const auto expert = model->named_parameters()["module.2.weight"];
    expect_equal(device_mesh(expert).size(), 1);
    expect_equal(to_local(expert.detach()).sizes().vec(), std::vector<int64_t>{12, 23});
    const auto shared = model->named_parameters()["module.1.weight"];
    expect_equal(to_local(shared.detach()).numel() < shared.numel(), true);
  });
}

TEST_CASE("row 23: MixtureOfExperts: not wrapped, all gradients but the expert's are averaged") {
  run_ranks(2, [](int) {
    const auto mesh = dp_mesh();
    const auto model = mixture_of_experts().init({.mesh = mesh, .deterministic = true});
    const auto input = model->get_input(at::kCPU);
    model->run_backward(model->get_loss(input, model->forward(input)));
    auto& layers = dynamic_cast<MixtureOfExpertsImpl&>(*model).module;
    const auto gradient_of = [&](size_t i) {
      torch::nn::Module holder;
      holder.register_buffer("grad", layers->ptr(i)->named_parameters()["weight"].grad());
      assert_module_states(holder, mesh);
    };
    gradient_of(0);
    gradient_of(1);
    gradient_of(3);
    expect_throws<ExpectationError>([&] { gradient_of(2); }, "differ");
  });
}

TEST_CASE("row 25: MLP: the buffer is added behind the last relu, and alone drawn again") {
  run_ranks(1, [](int) {
    const BuildScope build(3);
    MLP model(4, MLPOptions{.with_buffer = true});
    const auto weight = model->in_proj->weight.detach().clone();
    const auto buffer = model->buffer.clone();
    zero_model(*model);
    expect_bit_equal(model(at::ones({2, 4})).detach(), buffer.expand({2, 4}));
    const at::NoGradGuard no_grad;
    model->in_proj->weight.copy_(weight);
    model->reset_parameters();
    expect_bit_equal(model->in_proj->weight.detach(), weight);
    TESSERA_EXPECT((model->buffer - buffer).abs().max().item<double>() > 1e-3);
    expect_equal(MLP(4, MLPOptions{.bias = false})->parameters().size(), 2u);
  });
}

TEST_CASE("row 26: MLPStack: elements and values of three sizes; the norm has one parameter") {
  run_ranks(1, [](int) {
    const std::vector<std::tuple<int64_t, int64_t, double>> sizes{
        {3, 219, 2.098500}, {16, 5328, -7.064818}, {17, 6001, -6.772735}};
    for (const auto& [dim, elements, sum] : sizes) {
      const BuildScope build(42);
      const auto stack = make_mlp_stack(dim);
      expect_equal(num_elements(*stack), elements);
      expect_number(weight_sum(*stack, "0.in_proj.weight"), sum);
    }
    const auto stack = make_mlp_stack(3, /*with_seq_parallel=*/true);
    expect_equal(stack->parameters().size(), 13u);
    expect_equal(stack->named_parameters().keys().back(), std::string("3.weight"));
  });
}

TEST_CASE("row 28: MLPStack: each MLP is a unit, the norm belongs to the root's") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    for (const bool checkpoints : {false, true}) {
      auto stack = make_mlp_stack(3, /*with_seq_parallel=*/true);
      parallelize_mlp_stack(
          stack, {.tp_mesh = mesh["tp"], .dp_mesh = mesh["dp"], .use_activation_checkpointing = checkpoints});
      expect_equal(unit_name_set(*stack), std::set<std::string>{"", "0", "1", "2"});
      expect_equal(fsdp(*stack).num_parameters(), 1u);
      expect_equal(find_hook_point(*stack->ptr(0))->is_forward_wrapped(), checkpoints);
      expect_equal(find_hook_point(*stack->ptr(3))->is_forward_wrapped(), false);
    }
  });
}

TEST_CASE("row 29: DoubleLinear: both outputs of a unit; a layer that is never used keeps no gradient") {
  run_ranks(2, [](int rank) {
    const auto mesh = dp_mesh();
    DoubleLinear pair(4);
    DoubleLinearUnused single(4);
    for (torch::nn::Module* module :
         {static_cast<torch::nn::Module*>(pair.get()), static_cast<torch::nn::Module*>(single.get())}) {
      for (const auto& child : module->children()) {
        fully_shard(*child, {.mesh = mesh});
      }
      fully_shard(*module, {.mesh = mesh});
    }
    const auto x = at::ones({2, 4}) * (rank + 1);
    const auto [first, second] = pair(x);
    (first.sum() + second.sum()).backward();
    for (const auto& parameter : pair->parameters()) {
      TESSERA_EXPECT(parameter.grad().defined() && is_dtensor(parameter.grad()));
    }
    single(x).sum().backward();
    TESSERA_EXPECT(single->lin1->weight.grad().defined());
    TESSERA_EXPECT(!single->lin2->weight.grad().defined());
  });
}

}  // namespace tessera::testing
