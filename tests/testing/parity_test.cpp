// What check_sharded_parity and test_fsdp_parity find where all numbers are small, or none.

#include "testing/parity.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <limits>

#include "dtensor/dtensor.h"
#include "nn/linear.h"
#include "parallel/distribute_module.h"
#include "testing/expect.h"
#include "testing/fsdp_models/nested_wrapped_models.h"
#include "testing/fsdp_models/parity_driver.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Two layers of the same values, one of them replicated; every gradient is `grad`, that of the second times `factor`.
struct Pair {
  Pair(const DeviceMesh& mesh, double grad, double factor) : reference(make()), sharded(make()) {
    distribute_module(*sharded, mesh);
    for (const auto& parameter : reference->parameters()) {
      parameter.mutable_grad() = at::full_like(parameter, grad).detach();
    }
    for (const auto& parameter : sharded->parameters()) {
      parameter.mutable_grad() = at::full_like(parameter, grad * factor).detach();
    }
  }

  static tessera::nn::Linear make() {
    const BuildScope build(3);
    return tessera::nn::Linear(3, 4);
  }

  tessera::nn::Linear reference, sharded;
};

/// Its loss is not finite, whatever the output.
struct DivergingImpl : NestedWrappedModuleImpl {
  using NestedWrappedModuleImpl::NestedWrappedModuleImpl;
  at::Tensor get_loss(const std::vector<at::Tensor>& input, const at::Tensor& output) override {
    return NestedWrappedModuleImpl::get_loss(input, output) * std::numeric_limits<float>::quiet_NaN();
  }
};
TESSERA_MODULE(Diverging);

}  // namespace

TEST_CASE("check_sharded_parity: gradients are small or large among themselves") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    for (const double grad : {1e-8, 1e-6, 1.0, 1e6}) {
      const Pair right(mesh, grad, 1 + 1e-6), sums(mesh, grad, 2), zeros(mesh, grad, 0);
      check_sharded_parity(right.reference, right.sharded);
      for (const auto* wrong : {&sums, &zeros}) {
        expect_throws<ExpectationError>([&] { check_sharded_parity(wrong->reference, wrong->sharded); },
                                        "the gradient of 'weight'");
        check_sharded_parity(wrong->reference, wrong->sharded, {.gradients = false});
      }
    }
    // One that is small beside another is compared with the other's atol.
    const Pair pair(mesh, 1, 1);
    pair.reference->bias.mutable_grad().fill_(1e-7);
    pair.sharded->bias.mutable_grad().fill_(2e-7);
    check_sharded_parity(pair.reference, pair.sharded);
  });
}

TEST_CASE("check_sharded_parity: nothing equals a reference that is not finite") {
  const float bad = GENERATE(std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN());
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const Pair grads(mesh, bad, 1);
    expect_throws<ExpectationError>([&] { check_sharded_parity(grads.reference, grads.sharded); },
                                    "the gradient of 'weight' is not finite in the reference, which diverged");
    const Pair values(mesh, 1, 1);
    {
      const at::NoGradGuard no_grad;
      values.reference->bias.fill_(bad);
      values.sharded->bias.fill_(bad);
    }
    expect_throws<ExpectationError>([&] { check_sharded_parity(values.reference, values.sharded); },
                                    "parameter 'bias' is not finite in the reference");
  });
}

TEST_CASE("check_sharded_parity: a rank whose reference is not finite adds up pending sums with the others") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const Pair pair(mesh, 1, 1);
    const auto compare = [&] { check_sharded_parity(pair.reference, pair.sharded); };
    pair.sharded->weight.mutable_grad() = from_local(at::full({4, 3}, 0.5F), mesh, {Partial()});
    compare();
    if (rank == 0) {
      pair.reference->weight.mutable_grad().fill_(std::numeric_limits<float>::quiet_NaN());
      expect_throws<ExpectationError>(compare, "the gradient of 'weight' is not finite in the reference");
    } else {
      compare();
    }
  });
}

TEST_CASE("check_sharded_parity: tensors on two devices are a difference") {
  run_ranks(1, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {1}, {"dp"});
    const Pair pair(mesh, 1, 1);
    const auto on_meta = from_local(pair.reference->weight.detach().to(at::kMeta), mesh, {Replicate()});
    pair.sharded->weight.set_data(on_meta);
    expect_throws<ExpectationError>([&] { check_sharded_parity(pair.reference, pair.sharded, {.gradients = false}); },
                                    "the local tensor of parameter 'weight' is on meta, expected cpu");
  });
}

TEST_CASE("check_sharded_parity: plain parameters are an error, or compared whole") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    const Pair pair(mesh, 1, 1);
    const ParityOptions allowed{.allow_plain = true};
    pair.sharded->bias.set_data(pair.reference->bias.detach().clone());
    expect_throws<ExpectationError>([&] { check_sharded_parity(pair.reference, pair.sharded); }, "set allow_plain");
    pair.sharded->bias.mutable_grad() = pair.reference->bias.grad().clone();
    check_sharded_parity(pair.reference, pair.sharded, allowed);
    pair.sharded->bias.mutable_grad().mul_(2);
    expect_throws<ExpectationError>([&] { check_sharded_parity(pair.reference, pair.sharded, allowed); },
                                    "the local tensor of the gradient of 'bias', Float[4]");
  });
}

TEST_CASE("test_fsdp_parity: nothing equals a loss that is not finite") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const ModelClass diverging{
        .name = "Diverging",
        .init = [](const InitOptions& options) -> std::shared_ptr<FSDPTestModel> { return Diverging(options).ptr(); }};
    expect_throws<ExpectationError>([&] { test_fsdp_parity(diverging, {.mesh = mesh}); },
                                    "test_fsdp_parity: the reference's loss is nan: it diverged");
  });
}

TEST_CASE("test_fsdp_parity: float32 is no low precision") {
  run_ranks(2, [](int) {
    FSDPParityOptions options{.mesh = init_device_mesh(at::kCPU, {2}, {"dp"})};
    options.fsdp_options.mp_policy = {.param_dtype = at::kFloat, .reduce_dtype = at::kFloat};
    test_fsdp_parity(nested_wrapped_model(), options);
    // The losses differ by less than is allowed in a lower precision; the parameters are compared.
    options.num_iters = 1;
    options.shard = [](torch::nn::Module& module, const FullyShardOptions& of_unit) {
      fully_shard(module, of_unit);
      fsdp(module).set_gradient_divide_factor(1);  // sums
    };
    expect_throws<ExpectationError>([&] { test_fsdp_parity(nested_wrapped_model(), options); }, "differ");
  });
}

}  // namespace tessera::testing
