// FullyShardedDataParallel: errors and warnings that are at no other test's place, by kind and text.

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include "dtensor/dtensor.h"
#include "fsdp1/fsdp_optim_state.h"
#include "nn/hooks/clone.h"
#include "nn/sequential.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/reference/captured_warnings.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Texts = std::vector<std::string>;

/// As if on a device that this machine need not have: sizes, dtype and device, and no memory.
at::Tensor on_other_device() {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::XLA),
                                                   caffe2::TypeMeta::Make<float>(), at::Device(at::kXLA, 0));
  impl->set_sizes_contiguous({4});
  return at::Tensor(std::move(impl));
}

}  // namespace

TEST_CASE("rows 101, 116: clip_grad_norm_ warns where there are no gradients, on each rank, and only there") {
  const int world_size = GENERATE(2, 4);
  run_ranks(world_size, [](int) {
    const auto model = make_model();
    const CapturedWarnings warnings;
    const Texts expected{"clip_grad_norm_ on a model without gradients: the norm is 0, in float32"};
    TESSERA_EXPECT(model.clip_grad_norm_(1.0).scalar_type() == at::kFloat);
    expect_equal(warnings.texts(), expected);
    run_backward(model);
    model.clip_grad_norm_(1.0);
    expect_equal(warnings.texts(), expected);
  });
}

TEST_CASE("rows 92, 116: summon_full_params warns of a copy on the CPU for every rank, unless for rank 0 only") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    const CapturedWarnings warnings;
    FSDP::summon_full_params(*model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true}, [] {});
    FSDP::summon_full_params(*model, {}, [] {});
    expect_equal(warnings.texts(), Texts{});
    FSDP::summon_full_params(*model, {.offload_to_cpu = true}, [] {});
    expect_equal(warnings.texts(),
                 Texts{"summon_full_params: offload_to_cpu on every rank holds a full copy of the model a rank of this "
                       "host; pass rank0_only = true for one"});
  });
}

TEST_CASE("row 116: parameters that cannot be sharded together are refused by name, and nothing has changed") {
  run_ranks(2, [](int) {
    const auto refused = [](const auto& spoil, std::string_view text) {
      auto tower = make_tower();
      spoil(*tower);
      expect_throws<ValueError>([&] { wrap_module(*tower); }, text);
      TESSERA_EXPECT(FSDP::fsdp_modules(*tower).empty());
      for (const auto& parameter : tower->parameters()) {
        TESSERA_EXPECT(!is_dtensor(parameter));
      }
    };
    refused([](TowerImpl& tower) { tower.register_parameter("temperature", at::scalar_tensor(1.0)); },
            "'temperature' is a scalar (no dims)");
    refused([](TowerImpl& tower) { tower.out->to(at::kBFloat16); },
            "need one dtype, but 'in.weight' is Float and 'out.weight' is BFloat16");
    refused([](TowerImpl& tower) { tower.out->weight.set_data(tower.out->weight.data().t().contiguous().t()); },
            "'out.weight' is not contiguous");
  });
}

TEST_CASE("row 116: parameters on several devices, or on another one than device_id, are refused by name") {
  run_ranks(2, [](int) {
    const auto refused = [](FSDPOptions options, std::string_view text) {
      auto tower = make_tower();
      tower->register_parameter("scale", on_other_device());
      expect_throws<ValueError>([&] { wrap_module(*tower, std::move(options)); }, text);
      TESSERA_EXPECT(FSDP::fsdp_modules(*tower).empty() && !is_dtensor(tower->in->weight));
    };
    refused({}, "'scale' is on xla:0, but 'in.weight' on cpu; give device_id");
    refused({.device_id = at::Device(at::kCPU)}, "'scale' is on xla:0, but device_id is cpu; move the module there");
    refused({.device_mesh = init_device_mesh(at::kCPU, {2}, {"dp"})},
            "'scale' is on xla:0, but the mesh is DeviceMesh(cpu, {dp: 2})");
  });
}

TEST_CASE("rows 57, 116: a parameter that two units share is refused; frozen and trained ones go together") {
  run_ranks(2, [](int) {
    auto tower = make_tower();
    tie_parameter(*tower->blocks[1]->up, "weight", tower->blocks[0]->up->weight);
    expect_throws<ValueError>([&] { wrap_module(*tower, {.auto_wrap_policy = block_policy()}); },
                              "'up.weight' belongs to the unit tessera::testing::BlockImpl already, as 'up.weight'");
    auto other = make_tower();
    other->in->weight.set_requires_grad(false);
    other->register_parameter("order", at::arange(3), /*requires_grad=*/false);
    const FullyShardedDataParallel model(other);
    run_backward(model);
    TESSERA_EXPECT(!model->in->weight.grad().defined() && model->in->bias.grad().defined());
  });
}

TEST_CASE("rows 57, 88, 116: a forward with parameters that were replaced after wrapping stops on every rank") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    model->to(at::kDouble);
    expect_throws<StateError>([&] { model(batch_of(get_rank()).to(at::kDouble)); },
                              "were replaced after fully_shard took it");
    const auto other = make_model();
    // A plain part outside of the unit's forward.
    expect_throws<StateError>([&] { other->in(batch_of(get_rank())); },
                              "is sharded, but it meets tensors that are not");
    expect_gradients_of_average(other);
  });
}

TEST_CASE("rows 57, 116: gradients of gradients are refused, and the model trains on") {
  const int world_size = GENERATE(1, 2, 4);
  run_ranks(world_size, [](int) {
    const auto model = make_model();
    const auto differentiate = [&] {
      const auto loss = weighted_loss(model(batch_of(get_rank())));
      torch::autograd::grad({loss}, {model->parameters()[0]}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    };
    expect_throws<NotImplementedError>(differentiate, "a backward with create_graph through a unit");
    expect_gradients_of_average(model);
  });
}

TEST_CASE("row 116: rekey_optim_state_dict refuses a key type that is none") {
  run_ranks(2, [](int) {
    const auto model = make_model();
    torch::optim::SGD optimizer(model->parameters(), 1e-2);
    expect_throws<ValueError>([&] { rekey_optim_state_dict({}, static_cast<OptimStateKeyType>(7), *model, optimizer); },
                              "key type 7; PARAM_NAME and PARAM_ID are known");
  });
}

}  // namespace tessera::testing
