// How many collectives the state of a model takes: as many for a thousand small tensors as for ten.

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "comm/context/comm_stats.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/dtensor.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct ManyParams : torch::nn::Module {
  void add(const at::Tensor& param) {
    register_parameter(std::to_string(named_parameters().size()), param.detach().requires_grad_());
  }
};

at::Tensor numbers(at::IntArrayRef sizes, double first) {
  return at::arange(first, first + static_cast<double>(c10::multiply_integers(sizes)), at::kFloat).view(sizes);
}

/// Each of 5 rows, which two ranks share unevenly.
ManyParams rows(int count, const DeviceMesh& mesh) {
  ManyParams module;
  for (int i = 0; i < count; ++i) {
    module.add(distribute_tensor(numbers({5, 2}, i), mesh, {Shard(0)}));
  }
  return module;
}

/// Tensors that go together in a message, and such as may not.
ManyParams mixed(const DeviceMesh& mesh, double first) {
  ManyParams module;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto make = [&](at::IntArrayRef sizes) { return numbers(sizes, first += 100).to(dtype); };
    const auto cut = [&](const at::Tensor& whole, Placement placement) {
      module.add(distribute_tensor(whole, mesh, {placement}));
    };
    for (const Placement& placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      cut(make({5, 2}), placement);
      cut(make({1, 3}), placement);  // of which the second rank has no row
      module.add(make({2, 2}));
    }
    module.add(make({}));
    cut(make({0, 3}), Shard(0));
    cut(make({3}), Shard(0));
    cut(make({700, 1000}), Shard(0));  // of float32 a message has one
    cut(make({700, 1000}), Shard(0));
    cut(make({3, 2, 4}).transpose(0, 1), Shard(0));
  }
  return module;
}

template <class Step>
int64_t calls_of(const Step& step) {
  reset_comm_stats();
  step();
  return comm_stats().calls();
}

/// Of each step that goes through all tensors, in one order.
std::vector<int64_t> calls_of_all_steps(int count, const std::string& folder) {
  ManyParams module = rows(count, init_device_mesh(at::kCPU, {get_world_size()}));
  optim::FusedAdamW optimizer(module.parameters());
  for (const auto& param : module.parameters()) {
    param.mutable_grad() = at::zeros_like(param.detach());
  }
  optimizer.step();
  const dcp::StateDictOptions whole{.full_state_dict = true, .cpu_offload = true}, sent{.broadcast_from_rank0 = true};
  dcp::StateDict model, state;
  std::vector<int64_t> calls;
  const auto count_calls = [&](const auto& step) { calls.push_back(calls_of(step)); };
  count_calls([&] { model = dcp::get_model_state_dict(module, whole); });
  count_calls([&] { state = dcp::get_optimizer_state_dict(module, optimizer, whole); });
  count_calls([&] { dcp::set_model_state_dict(module, model, sent); });
  count_calls([&] { dcp::set_optimizer_state_dict(module, optimizer, state, sent); });
  dcp::State all{.model = dcp::get_model_state_dict(module),
                 .optimizer = dcp::get_optimizer_state_dict(module, optimizer)};
  count_calls([&] { dcp::save(folder, all); });
  count_calls([&] { all.optimizer = dcp::optimizer_state_to_load(folder, module, optimizer); });
  count_calls([&] { dcp::load(folder, all); });
  count_calls([&] { dcp::set_model_state_dict(module, all.model); });
  count_calls([&] { dcp::set_optimizer_state_dict(module, optimizer, all.optimizer); });
  return calls;
}

}  // namespace

TEST_CASE("small tensors go together: collectives do not grow with their number") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    const auto few = calls_of_all_steps(10, folder.path("few")), many = calls_of_all_steps(200, folder.path("many"));
    expect_equal(few, many);
    TESSERA_EXPECT(std::ranges::all_of(few, [](int64_t calls) { return calls > 0 && calls < 20; }));
  });
}

TEST_CASE("tensors that go together come out as those that go alone") {
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    ManyParams from = mixed(mesh, 0), to = mixed(mesh, 1), again = mixed(mesh, 1);
    const auto on_all = dcp::get_model_state_dict(from, {.full_state_dict = true});
    for (const auto& item : from.named_parameters()) {
      expect_bit_equal(std::get<at::Tensor>(on_all.at(item.key())), full_tensor(item.value().detach()));
    }
    dcp::set_model_state_dict(to, dcp::get_model_state_dict(from, {.full_state_dict = true, .cpu_offload = true}),
                              {.broadcast_from_rank0 = true});
    dcp::set_model_state_dict(again, on_all, {.full_state_dict = true});
    for (const auto& item : from.named_parameters()) {
      expect_bit_equal(full_tensor(to.named_parameters()[item.key()].detach()), full_tensor(item.value().detach()));
      expect_bit_equal(full_tensor(again.named_parameters()[item.key()].detach()), full_tensor(item.value().detach()));
    }
  });
}

}  // namespace tessera::testing
