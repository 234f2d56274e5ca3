// FullyShardedDataParallel's to() in the middle of training, against one process that converts at the same steps.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <torch/nn/cloneable.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/clone_sharded.h"
#include "fully_shard/convert_units.h"
#include "fully_shard/replicate.h"
#include "fully_shard/to_empty.h"
#include "nn/hooks/hook_point.h"
#include "nn/hooks/hooked.h"
#include "nn/linear.h"
#include "nn/meta_device.h"
#include "nn/normalization.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "tests/reference/wrapped_tower.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr Tolerance kDouble{.rtol = 1e-9, .atol = 1e-12}, kFloat{.rtol = 1e-4, .atol = 1e-5},
    kLow{.rtol = 3e-2, .atol = 3e-2};

Tolerance tolerance_of(at::ScalarType dtype) {
  return dtype == at::kDouble ? kDouble : dtype == at::kFloat ? kFloat : kLow;
}

at::Tensor whole_value(const at::Tensor& tensor) {
  return full_tensor(tensor.detach()).cpu();
}

std::vector<const c10::TensorImpl*> identities(const TowerModel& model) {
  std::vector<const c10::TensorImpl*> impls;
  for (const auto& parameter : model->parameters()) {
    impls.push_back(parameter.unsafeGetTensorImpl());
  }
  TESSERA_EXPECT(impls[0] == model->in->weight.unsafeGetTensorImpl());
  return impls;
}

/// A wrapped tower, and the plain one that one process trains on all ranks' batches.
class TrainedBeside {
 public:
  explicit TrainedBeside(FSDPOptions options = {}) : TrainedBeside(make_model(std::move(options))) {}
  explicit TrainedBeside(TowerModel wrapped) : model(std::move(wrapped)), impls_(identities(model)) {}

  template <class Optimizer, class Options>
  void optimize_with(const Options& options) {
    optimizer = std::make_unique<Optimizer>(model->parameters(), options);
    reference_optimizer = std::make_unique<Optimizer>(reference->parameters(), options);
  }

  /// Ranks that hold the same batch, as those of tensor parallelism do, share a number.
  void step(Tolerance tolerance, int64_t batches = get_world_size(), int64_t own = get_rank()) {
    optimizer->zero_grad();
    reference_optimizer->zero_grad();
    const auto dtype = reference->in->weight.scalar_type();
    at::Tensor expected;
    for (int64_t batch = 0; batch < batches; ++batch) {
      const auto loss = weighted_loss(reference(batch_at(batch).to(dtype)));
      expected = batch == own ? loss.detach() : expected;
      (loss / static_cast<double>(batches)).backward();
    }
    const auto loss = weighted_loss(model(batch_at(own).to(dtype)));
    expect_close(loss.detach().cpu(), expected, tolerance);
    loss.backward();
    expect_gradients(tolerance);
    optimizer->step();
    reference_optimizer->step();
    expect_values(tolerance);
    TESSERA_EXPECT(identities(model) == impls_);
    ++steps_;
  }

  void expect_gradients(Tolerance tolerance) const {
    const auto expected = reference->named_parameters();
    for (const auto& item : model->named_parameters()) {
      expect_close(whole_value(item.value().grad()), expected[item.key()].grad(), tolerance);
    }
  }
  void expect_values(Tolerance tolerance) const {
    const auto expected = reference->named_parameters();
    for (const auto& item : model->named_parameters()) {
      TESSERA_EXPECT(is_dtensor(item.value()));
      expect_close(whole_value(item.value()), expected[item.key()].detach(), tolerance);
    }
  }

  void to(at::ScalarType dtype) {
    model.to(dtype);
    reference->zero_grad();
    reference->to(dtype);
  }

  TowerModel model;
  Tower reference = make_tower();
  std::unique_ptr<torch::optim::Optimizer> optimizer, reference_optimizer;

 private:
  at::Tensor batch_at(int64_t number) const { return batch_of(static_cast<int>(number + 10 * steps_)); }

  std::vector<const c10::TensorImpl*> impls_;
  int64_t steps_ = 0;
};

void expect_shards(const TowerModel& model, at::ScalarType dtype, c10::Device device) {
  for (const auto& parameter : model->parameters()) {
    const auto local = to_local(parameter.detach());
    TESSERA_EXPECT(parameter.scalar_type() == dtype && local.scalar_type() == dtype && local.device() == device);
    TESSERA_EXPECT(device_mesh(parameter).device_type() == model.device_mesh().device_type());
    if (parameter.grad().defined()) {
      TESSERA_EXPECT(parameter.grad().scalar_type() == dtype && to_local(parameter.grad()).device() == device);
    }
  }
}

/// Two units and a root, which clone() knows how to make.
struct CopiedNetImpl : torch::nn::Cloneable<CopiedNetImpl> {
  CopiedNetImpl() { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(5, 7));
    second = register_module("second", nn::Linear(7, 5));
    norm = register_module("norm", nn::LayerNorm(std::vector<int64_t>{5}));
  }
  at::Tensor forward(at::Tensor x) { return norm(second(first(x).tanh())); }

  nn::Linear first{nullptr}, second{nullptr};
  nn::LayerNorm norm{nullptr};
};
TESSERA_MODULE(CopiedNet);

/// Shards of the first unit are columns.
void shard_net(CopiedNet& net, const FullyShardOptions& options = {}) {
  auto by_columns = options;
  by_columns.shard_placement_fn = [](const at::Tensor& param) { return std::optional(Shard(param.dim() - 1)); };
  fully_shard(net->first, by_columns);
  fully_shard(net->second, options);
  fully_shard(net, options);
}

/// Of a block's weight in the last forward.
struct Seen {
  explicit Seen(const TowerModel& model)
      : hook(hook_point(*model->blocks[1], "test").register_forward_pre_hook([this, &model](HookPoint&, TensorRefs) {
          dtype = model->blocks[1]->up->weight.scalar_type();
          device = model->blocks[1]->up->weight.device();
        })) {}

  at::ScalarType dtype = at::kByte;
  c10::Device device = at::kMeta;
  ScopedHook hook;
};

}  // namespace

TEST_CASE("row 95: to() another dtype, by one process that does the same: optimizers that are kept, and new ones") {
  const int ranks = GENERATE(1, 2, 3, 4);
  run_ranks(ranks, [](int) {
    for (const auto strategy : kAllStrategies) {
      for (const bool keeps : {true, false}) {
        TrainedBeside trained({.sharding_strategy = strategy, .device_mesh = mesh_for(strategy)});
        const auto new_optimizer = [&] {
          trained.optimize_with<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
        };
        new_optimizer();
        std::vector dtypes{at::kFloat, at::kDouble, at::kFloat, at::kBFloat16};
        if (!keeps) {
          dtypes.push_back(at::kFloat);
        }
        for (const auto dtype : dtypes) {
          trained.to(dtype);
          expect_shards(trained.model, dtype, at::kCPU);
          if (!keeps) {
            new_optimizer();
          }
          // What was computed in fewer digits before is alike to so many.
          const auto tolerance = tolerance_of(keeps && dtype == at::kDouble ? at::kFloat : dtype);
          trained.step(tolerance);
          trained.step(tolerance);
          // From here on with equal values.
          const at::NoGradGuard no_grad;
          for (const auto& item : trained.model->named_parameters()) {
            trained.reference->named_parameters()[item.key()].copy_(whole_value(item.value()));
          }
        }
      }
    }
  });
}

TEST_CASE("row 95: to() another dtype casts values and gradients, and later ones add up in it") {
  run_ranks_on_devices(3, [](int rank, c10::Device device) {
    const auto model = make_model({.device_id = device});
    const auto backward = [&](at::ScalarType dtype) { weighted_loss(model(batch_of(rank).to(dtype))).backward(); };
    backward(at::kFloat);
    std::vector<at::Tensor> values, gradients;
    for (const auto& parameter : model->parameters()) {
      values.push_back(whole_value(parameter));
      gradients.push_back(whole_value(parameter.grad()));
    }
    model.to(at::kDouble);
    expect_shards(model, at::kDouble, device);
    size_t i = 0;
    for (const auto& parameter : model->parameters()) {
      expect_bit_equal(whole_value(parameter), values[i].to(at::kDouble));
      expect_bit_equal(whole_value(parameter.grad()), gradients[i++].to(at::kDouble));
    }
    backward(at::kDouble);
    i = 0;
    for (const auto& parameter : model->parameters()) {
      expect_close(whole_value(parameter.grad()), gradients[i++].to(at::kDouble) * 2, kFloat);
      parameter.mutable_grad() = at::Tensor();
    }
    model.to(at::kBFloat16);
    expect_shards(model, at::kBFloat16, device);
    model.to(at::kFloat);
    i = 0;
    for (const auto& parameter : model->parameters()) {
      expect_bit_equal(whole_value(parameter), values[i++].to(at::kBFloat16).to(at::kFloat));
    }
  });
}

TEST_CASE("row 95: to() moves a model between the CPU and a GPU in the middle of training") {
  const auto device = test_devices().back();
  if (device.is_cpu()) {
    return;
  }
  const int ranks = GENERATE(1, 2, 3, 4);
  run_ranks(ranks, [&](int) {
    const OwnStream stream(device);
    for (const auto strategy : kAllStrategies) {
      for (const bool offloads : {false, true}) {
        TrainedBeside trained({.sharding_strategy = strategy,
                               .cpu_offload = {.offload_params = offloads},
                               .device_mesh = mesh_for(strategy)});
        trained.model->register_buffer("count", at::arange(3));
        trained.optimize_with<torch::optim::SGD>(torch::optim::SGDOptions(1e-2));
        Seen seen(trained.model);
        trained.step(kFloat);
        for (const auto where : {device, c10::Device(at::kCPU), device}) {
          where.is_cpu() ? trained.model.cpu() : trained.model.cuda();
          TESSERA_EXPECT(trained.model.device_mesh() == mesh_for(strategy, where.type()));
          TESSERA_EXPECT(trained.model->named_buffers()["count"].device() == where);
          expect_shards(trained.model, at::kFloat, offloads ? c10::Device(at::kCPU) : where);
          trained.expect_values(kFloat);
          trained.expect_gradients(kFloat);
          trained.step(kFloat);
          TESSERA_EXPECT(seen.device == where);
          trained.step(kFloat);
          trained.model.to(at::kDouble);
          trained.reference->zero_grad();
          trained.reference->to(at::kDouble);
          trained.step(kFloat);
          trained.to(at::kFloat);
          trained.step(kFloat);
        }
        // Without the host in between, which would order what streams do.
        const auto batch = batch_of(get_rank()).to(device);
        for (int i = 0; i < 2; ++i) {
          weighted_loss(trained.model(batch)).backward();
          trained.optimizer->step();
        }
      }
    }
  });
}

TEST_CASE(
    "row 95: optimizer state stays as it is: it is there when a model comes back, and refused where it does not fit") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    TrainedBeside trained;
    trained.optimize_with<optim::FusedAdamW>(torch::optim::AdamWOptions(1e-2));
    trained.step(kFloat);
    trained.model.to(device);
    {
      const at::NoGradGuard no_grad;
      expect_close(trained.model(batch_of(rank)).cpu(), trained.reference(batch_of(rank)), kFloat);
    }
    if (device.is_cuda()) {
      expect_throws<ValueError>([&] { trained.optimizer->step(); },
                                "a parameter is Float on cuda:0, but its state Float");
    }
    trained.model.cpu();
    trained.step(kFloat);

    const auto model = make_model({.device_id = device});
    optim::FusedAdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    optim::FusedSGD sgd(model->parameters(), torch::optim::SGDOptions(1e-2).momentum(0.9));
    run_backward(model);
    optimizer.step();
    sgd.step();
    model.to(at::kDouble);
    const auto is_converted = [&](auto& stepped) {
      expect_throws<ValueError>([&] { stepped.step(); }, "its state Float on " + device.str() + ": it was converted");
    };
    is_converted(optimizer);
    is_converted(sgd);
  });
}

TEST_CASE("row 95: mixed precision stays after to(), and modules in full precision have the new one") {
  run_ranks(2, [](int rank) {
    const auto model =
        make_model({.mixed_precision = {.param_dtype = at::kBFloat16,
                                        .module_classes_to_ignore = module_classes<nn::LayerNorm::ContainedType>()}});
    Seen seen(model);
    at::ScalarType in_norm = at::kByte;
    const ScopedHook hook(
        hook_point(*model->norm, "test").register_forward_pre_hook([&](HookPoint&, TensorRefs inputs) {
          in_norm = inputs[0]->scalar_type();
        }));
    weighted_loss(model(batch_of(rank))).backward();
    TESSERA_EXPECT(seen.dtype == at::kBFloat16 && in_norm == at::kFloat);
    model.to(at::kDouble);
    weighted_loss(model(batch_of(rank))).backward();
    TESSERA_EXPECT(seen.dtype == at::kBFloat16 && in_norm == at::kDouble);
    expect_shards(model, at::kDouble, at::kCPU);
  });
}

TEST_CASE("row 95: to() converts units of fully_shard and replicate inside, and what is in no unit, with gradients") {
  run_ranks_on_devices(4, [](int, c10::Device device) {
    auto tower = make_tower();
    tower->register_buffer("scale", at::ones({3}, at::kHalf));
    fully_shard(tower->blocks[0], {.reshard_after_forward = 2});
    replicate(tower->blocks[1]);
    TrainedBeside trained{TowerModel(tower)};
    trained.optimize_with<torch::optim::SGD>(torch::optim::SGDOptions(1e-2));
    trained.step(kFloat);
    trained.to(at::kDouble);
    trained.model.to(device);
    expect_shards(trained.model, at::kDouble, device);
    TESSERA_EXPECT(trained.model->named_buffers()["scale"].scalar_type() == at::kDouble);
    trained.step(kFloat);
    trained.step(kFloat);

    auto second = make_tower();
    const auto ignored = second->in->weight;
    const TowerModel model(second, {.ignored_states = {ignored}});
    weighted_loss(model(batch_of(0))).backward();
    const auto gradient = ignored.grad().clone();
    model.to(at::kDouble);
    expect_bit_equal(ignored.grad(), gradient.to(at::kDouble));
    weighted_loss(model(batch_of(0).to(at::kDouble))).backward();
    expect_close(ignored.grad(), gradient.to(at::kDouble) * 2, kFloat);
  });
}

TEST_CASE("row 95: to() another dtype under tensor parallelism; another device is refused") {
  run_ranks_on_devices(4, [](int, c10::Device device) {
    const auto mesh = init_device_mesh(device.type(), {2, 2}, {"dp", "tp"});
    auto tower = make_tower();
    tower->to(device);
    parallelize_tower(tower, mesh["tp"]);
    TrainedBeside trained(TowerModel(tower, {.auto_wrap_policy = block_policy(), .device_mesh = mesh["dp"]}));
    const auto step = [&](Tolerance tolerance) { trained.step(tolerance, 2, mesh.local_rank("dp")); };
    trained.optimize_with<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
    step(kFloat);
    trained.to(at::kDouble);
    step(kFloat);
    step(kFloat);
    const c10::Device other = device.is_cpu() ? at::kCUDA : at::kCPU;
    if (test_devices().size() > 1) {
      expect_throws<NotImplementedError>([&] { trained.model.to(other); }, "its tensor-parallel plan computes there");
    }
    step(kFloat);
  });
}

TEST_CASE("row 95: after to(): state dicts, checkpoints, norms and summoned parameters are of the new dtype") {
  const TempFolder folder;
  run_ranks(3, [&](int rank) {
    TrainedBeside trained;
    trained.optimize_with<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
    trained.step(kFloat);
    trained.to(at::kDouble);
    trained.optimize_with<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
    trained.step(kFloat);
    const auto& model = trained.model;
    const auto norm = model.clip_grad_norm_(1e9);
    TESSERA_EXPECT(norm.scalar_type() == at::kDouble);
    FSDP::summon_full_params(*model, {}, [&] {
      TESSERA_EXPECT(!is_dtensor(model->in->weight) && model->in->weight.scalar_type() == at::kDouble);
      const at::NoGradGuard no_grad;
      model->in->weight.mul_(2);
      trained.reference->in->weight.mul_(2);
    });
    trained.expect_values(kFloat);
    for (const auto type : {StateDictType::FULL_STATE_DICT, StateDictType::SHARDED_STATE_DICT}) {
      FSDP::set_state_dict_type(*model, StateDictSettings::make(type));
      const auto state = FSDP::state_dict(*model);
      for (const auto& item : state) {
        TESSERA_EXPECT(item.value().scalar_type() == at::kDouble);
      }
      auto other = make_model();
      other.to(at::kDouble);
      FSDP::set_state_dict_type(*other, StateDictSettings::make(type));
      FSDP::load_state_dict(*other, state);
      expect_bit_equal(whole_value(other->out->weight), whole_value(model->out->weight));
    }
    dcp::save(folder.path("step"), {.model = dcp::get_model_state_dict(*model),
                                    .optimizer = dcp::get_optimizer_state_dict(*model, *trained.optimizer)});
    TrainedBeside loaded;
    loaded.to(at::kDouble);
    loaded.optimize_with<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
    dcp::State state{.model = dcp::get_model_state_dict(*loaded.model),
                     .optimizer = dcp::optimizer_state_to_load(folder.path("step"), *loaded.model, *loaded.optimizer)};
    dcp::load(folder.path("step"), state);
    dcp::set_optimizer_state_dict(*loaded.model, *loaded.optimizer, state.optimizer);
    const auto expected = model->named_parameters();
    for (const auto& item : loaded.model->named_parameters()) {
      expect_bit_equal(whole_value(item.value()), whole_value(expected[item.key()]));
    }
    weighted_loss(model(batch_of(rank).to(at::kDouble))).backward();
  });
}

TEST_CASE("row 95: settings, hooks, frozen and integer parameters outlast to()") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    auto tower = make_tower();
    tower->blocks[0]->up->weight.set_requires_grad(false);
    tower->register_parameter("mask", at::arange(5), /*requires_grad=*/false);
    const TowerModel model(tower, {.auto_wrap_policy = block_policy()});
    int reduced = 0, gathered = 0;
    model.register_comm_hook({.run = [&](const at::Tensor& full, const at::Tensor& output) {
      ++reduced;
      output.copy_(full.view({2, -1}).select(0, rank)).mul_(rank + 1);
    }});
    fsdp(model->blocks[0]).set_custom_all_gather([&](const auto& output, const auto& input, const auto& group) {
      ++gathered;
      return all_gather_async(output, input, group);
    });
    int events = 0;
    fsdp(*model).set_event_observer([&](const FSDPEvent&) { ++events; });
    weighted_loss(model(batch_of(rank))).backward();
    const auto in_float = std::pair(reduced, gathered);
    const auto gradient = whole_value(model->out->weight.grad());
    TESSERA_EXPECT(reduced > 0 && gathered > 0);
    reduced = gathered = events = 0;
    model->zero_grad();
    model.to(at::kDouble);
    model.to(device);
    TESSERA_EXPECT(model.check_is_root());
    TESSERA_EXPECT(model->named_parameters()["mask"].scalar_type() == at::kLong);
    expect_equal(whole_value(model->named_parameters()["mask"]).sum().item<int64_t>(), int64_t{10});
    weighted_loss(model(batch_of(rank).to(at::kDouble))).backward();
    TESSERA_EXPECT(std::pair(reduced, gathered) == in_float && events > 0);
    TESSERA_EXPECT(!model->blocks[0]->up->weight.grad().defined());
    expect_close(whole_value(model->out->weight.grad()), gradient.to(at::kDouble), kFloat);
  });
}

TEST_CASE("row 95: to() between the backwards of one graph is an error in the second, and in inference mode it works") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    const auto model = make_model({.device_id = device});
    const auto loss = weighted_loss(model(batch_of(rank)));
    loss.backward({}, /*retain_graph=*/true);
    model.to(at::kDouble);
    expect_throws<StateError>([&] { loss.backward(); }, "was changed in place between forward and backward");
    expect_throws<StateError>([&] { model.to(at::kFloat); }, "reset_iter_state() on the outermost module drops");
    fsdp(*model).reset_iter_state();
    if (device.is_cpu()) {  // the simulated GPU has no views of inference tensors
      const c10::InferenceMode mode;
      const auto before = model(batch_of(rank).to(at::kDouble));
      model.to(at::kFloat);
      expect_close(model(batch_of(rank)), before.to(at::kFloat), kFloat);
    }
    model.to(at::kFloat);
    weighted_loss(model(batch_of(rank))).backward();
  });
}

TEST_CASE("row 95: to() is refused on every rank, before any change, where it cannot be") {
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    const auto model = make_model({.device_id = device});
    const auto both = [&](const auto& action) {
      expect_throws<StateError>(action, "awaits the backward of a forward");
    };
    {
      const auto output = model(batch_of(rank));
      both([&] { model.to(at::kDouble); });
      both([&] { FSDP::fsdp_modules(*model)[1].to(at::kDouble); });
      model.to(at::kFloat);  // as it is
    }
    // What only one rank has is an error of all.
    const auto kept = rank == 1 ? model(batch_of(rank)) : at::Tensor();
    if (rank == 0) {
      const at::NoGradGuard no_grad;
      model(batch_of(rank));
    }
    if (rank == 1) {
      both([&] { model.to(at::kDouble); });
    } else {
      expect_throws<ValueError>([&] { model.to(at::kDouble); }, "rank 1 cannot: to: the unit 'root' computes, awaits");
    }
  });
  run_ranks_on_devices(2, [](int rank, c10::Device device) {
    const auto model = make_model({.device_id = device});
    model.no_sync([&] { run_backward(model); });
    expect_throws<StateError>([&] { model.to(at::kDouble); }, "gradients that await their reduction");
    run_backward(model);
    expect_throws<ValueError>([&] { model.to(rank == 0 ? at::kDouble : at::kBFloat16); }, "the ranks differ");
    expect_throws<ValueError>([&] { model.to(at::kLong); }, "Long is no floating dtype");
    expect_throws<ValueError>([&] { model.to(at::kMeta); }, "to: meta; shards go to the CPU or to a GPU");
    expect_throws<ValueError>([&] { model.to({at::kCUDA, 77}); }, "to: cuda:77, but this process sees");
    FSDP::summon_full_params(*model->blocks[0], {}, [&] {
      expect_throws<ValueError>([&] { model.to(at::kDouble); }, "SUMMON_FULL_PARAMS, allowed: IDLE");
    });
    if (device.is_cuda()) {
      expect_throws<NotImplementedError>(
          [&] {
            model.to({at::kCUDA, 1});
          },
          "its ranks communicate on one GPU each. Build it on cuda:1, or give device_id = cuda:1");
      model.cpu();
      expect_throws<ValueError>([&] { model.to({at::kCUDA, 1}); }, "make cuda:1 the current device first");
      model.to(device);
    }
    expect_shards(model, at::kFloat, device);
    model->to(at::kDouble);  // libtorch's own
    expect_throws<StateError>([&] { model.to(at::kBFloat16); }, "were replaced after fully_shard took it");
  });
}

TEST_CASE("row 95: units of fully_shard convert without a wrapper: copies of them too, and those without memory") {
  run_ranks_on_devices(3, [](int rank, c10::Device device) {
    const auto loss = [&](CopiedNet& net) {
      const auto& weight = net->first->weight;
      return weighted_loss(net(batch_of(rank).to(weight.device(), weight.scalar_type())));
    };
    CopiedNet net;
    fill_parameters(*net, 7);
    shard_net(net);
    loss(net).backward();
    const auto convert = [&](torch::nn::Module& module) {
      convert_units(module, "test", [] { return UnitConversion{.dtype = at::kDouble}; });
      convert_units(module, "test", [&] { return UnitConversion{.device = device}; });
    };
    convert(*net);
    auto copy = clone_sharded(net);
    loss(net).backward();
    loss(copy).backward();
    const auto of_copy = copy->named_parameters();
    for (const auto& item : net->named_parameters()) {
      expect_bit_equal(of_copy[item.key()], item.value());
      TESSERA_EXPECT(to_local(item.value().detach()).device() == device && item.value().scalar_type() == at::kDouble);
      expect_close(whole_value(of_copy[item.key()].grad()) * 2, whole_value(item.value().grad()), kFloat);
    }

    auto on_meta = [] {
      const MetaDeviceGuard guard;
      return CopiedNet();
    }();
    shard_net(on_meta, {.mesh = init_device_mesh(at::kCPU, {3})});
    convert(*on_meta);
    to_empty(on_meta, device);
    for (const auto& item : on_meta->named_parameters()) {
      to_local(item.value().detach()).copy_(to_local(of_copy[item.key()].detach()));
    }
    copy->zero_grad();
    loss(on_meta).backward();
    loss(copy).backward();
    for (const auto& item : on_meta->named_parameters()) {
      expect_close(whole_value(item.value()), whole_value(of_copy[item.key()]), kFloat);
      expect_close(whole_value(item.value().grad()), whole_value(of_copy[item.key()].grad()), kFloat);
    }
  });
}

}  // namespace tessera::testing
