// Tensors that load() and set_model_state_dict() write beside dispatch: who else looks at them, and which cannot be.

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("a graph that saved a DTensor finds that it was loaded into, or set") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto whole = at::full({40000}, 5.0);
    const auto given = distribute_tensor(whole, mesh, {Shard(0)});
    const auto w = distribute_tensor(at::full({40000}, 3.0), mesh, {Shard(0)}).requires_grad_();
    torch::nn::Module module;
    module.register_parameter("w", w);
    const auto expect_found = [&](const auto& write) {
      const auto loss = (w * w).sum();
      write();
      expect_throws<c10::Error>([&] { loss.backward(); }, "modified by an inplace operation");
      expect_bit_equal(full_tensor(w.detach()), whole);
    };
    dcp::save(folder.path("c"), {.model = {{"w", given}}});
    expect_found([&] {
      dcp::State state{.model = {{"w", w}}};
      dcp::load(folder.path("c"), state);
    });
    expect_found([&] {
      dcp::State state{.model = dcp::get_model_state_dict(module)};
      dcp::load(folder.path("c"), state);
    });
    expect_found([&] { dcp::set_model_state_dict(module, {{"w", given}}); });
    expect_found([&] { dcp::set_model_state_dict(module, {{"w", whole}}, {.full_state_dict = true}); });
    expect_found([&] { dcp::set_model_state_dict(module, {{"w", whole}}, {.broadcast_from_rank0 = true}); });
  });
}

TEST_CASE("views that are copies cannot be written, and are not saved when they are stale") {
  const TempFolder folder;
  run_ranks(2, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto w = distribute_tensor(at::zeros({4, 2}), mesh, {Shard(0)});
    const auto head = w.narrow(0, 0, 3);
    dcp::State state{.model = {{"head", head}}};
    dcp::save(folder.path("c"), state);
    expect_throws<NotImplementedError>([&] { dcp::load(folder.path("c"), state); },
                                       "'head' is a view whose data had to be moved");
    torch::nn::Module module;
    module.register_buffer("head", head);
    const dcp::StateDictOptions full{.full_state_dict = true};
    expect_throws<NotImplementedError>(
        [&] {
          dcp::set_model_state_dict(module, {{"head", at::ones({3, 2})}}, full);
        },
        "'head' is a view whose data had to be moved");
    expect_bit_equal(full_tensor(head), at::zeros({3, 2}));
    w.add_(1);
    expect_throws<StateError>([&] { dcp::save(folder.path("stale"), state); }, "'head'");
  });
}

TEST_CASE("tensors whose memory was freed are refused on every rank") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const auto freed = at::ones({4});
    const dcp::State state{.user = {{"w", freed}}};
    dcp::save(folder.path("c"), state);
    if (rank == 1) {
      freed.storage().set_nbytes(8);
    }
    const auto message = "w' ends at byte 16 of a storage of 8";
    expect_throws<ValueError>([&] { dcp::save(folder.path("d"), state); }, message);
    auto loaded = state;
    expect_throws<ValueError>([&] { dcp::load(folder.path("c"), loaded); }, message);
    torch::nn::Module module;
    module.register_buffer("w", at::zeros({4}));
    const auto set = [&] { dcp::set_model_state_dict(module, state.user); };  // of a plain model: each rank alone
    if (rank == 1) {
      expect_throws<ValueError>(set, message);
      expect_bit_equal(module.named_buffers()["w"], at::zeros({4}));
    } else {
      set();
      expect_bit_equal(module.named_buffers()["w"], at::ones({4}));
    }
  });
}

}  // namespace tessera::testing
