#include "dtensor/saved_dtensor.h"

#include <torch/serialize.h>

#include <sstream>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/dtensor/test_values.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// What torch::load makes of what torch::save wrote of `tensor`, on `mesh`.
at::Tensor saved_and_loaded(const at::Tensor& tensor, const DeviceMesh& mesh) {
  std::stringstream stream;
  torch::save(SavedDTensor{tensor}, stream);
  SavedDTensor loaded{.mesh = mesh};
  torch::load(loaded, stream);
  return loaded.tensor;
}

void expect_same_dtensor(const at::Tensor& loaded, const at::Tensor& tensor) {
  expect_equal(loaded.is_leaf(), true);
  expect_equal(loaded.requires_grad(), tensor.requires_grad());
  expect_equal(dtensor_spec(loaded)->to_string(), dtensor_spec(tensor)->to_string());
  expect_equal(loaded.strides().vec(), tensor.strides().vec());
  expect_bit_equal(to_local(loaded).detach(), to_local(tensor).detach());
}

}  // namespace

TEST_CASE("a DTensor that was saved is loaded as it was", "[dtensor]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    for (const Placements& placements : {Placements{Shard(0), Shard(1)}, Placements{Shard(0, 1), Shard(0)},
                                         Placements{Replicate(), Shard(1)}, Placements{Replicate(), Replicate()}}) {
      const auto tensor = distribute_tensor(ramp({5, 3}), mesh, placements);
      expect_same_dtensor(saved_and_loaded(tensor, mesh), tensor);
      expect_same_dtensor(saved_and_loaded(tensor.t(), mesh), tensor.t());
    }
    const auto empty_parts = distribute_tensor(ramp({1, 2}).to(at::kBFloat16), mesh["tp"], {Shard(0)});
    expect_same_dtensor(saved_and_loaded(empty_parts, mesh["tp"]), empty_parts);
    auto leaf = distribute_tensor(ramp({5}), mesh, {Shard(0), Replicate()});
    leaf.set_requires_grad(true);
    expect_same_dtensor(saved_and_loaded(leaf, mesh), leaf);
    const auto term = from_local(ramp({3}), mesh, {Replicate(), Partial(ReduceOp::Max)});
    expect_same_dtensor(saved_and_loaded(term, mesh), term);
  });
}

TEST_CASE("what is saved is the local tensor, not the memory around it", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    std::stringstream stream;
    torch::save(SavedDTensor{.tensor = from_local(ramp({100000}).narrow(0, 7, 4), mesh, {Shard(0)})}, stream);
    TESSERA_EXPECT(stream.str().size() < 10000);
    SavedDTensor loaded{.mesh = mesh};
    torch::load(loaded, stream);
    expect_bit_equal(to_local(loaded.tensor), ramp({100000}).narrow(0, 7, 4));
  });
}

TEST_CASE("what does not fit is refused, and nothing is loaded", "[dtensor]") {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
    const auto tensor = distribute_tensor(ramp({5}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { saved_and_loaded(ramp({5}), mesh); }, "not a DTensor");
    expect_throws<ValueError>([&] { saved_and_loaded(tensor, DeviceMesh()); }, "SavedDTensor.mesh is empty");
    expect_throws<ValueError>(
        [&] { saved_and_loaded(tensor, init_device_mesh(at::kCPU, {2}, {"tp"})); },
        "the tensor was saved on a mesh of shape [2] with the axes [dp], and is loaded on DeviceMesh(cpu, {tp: 2})");
    expect_throws<ValueError>(
        [&] {
          saved_and_loaded(tensor, init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"}));
        },
        "save checkpoints, which open on any");

    // The other rank's file.
    std::stringstream stream;
    torch::save(SavedDTensor{tensor}, stream);
    static std::string of_rank[2];
    of_rank[rank] = stream.str();
    full_tensor(tensor);  // both have written
    std::istringstream other(of_rank[1 - rank]);
    SavedDTensor loaded{.mesh = mesh};
    expect_throws<ValueError>([&] { torch::load(loaded, other); }, "the file is that of the rank at [");
    expect_equal(loaded.tensor.defined(), false);
    full_tensor(tensor);  // both have read
    std::istringstream garbage("not an archive");
    expect_throws<c10::Error>([&] { torch::load(loaded, garbage); }, "not a ZIP archive");
  });
}

TEST_CASE("a view of moved data is not saved once its tensor was written", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    auto tensor = distribute_tensor(ramp({4}), mesh, {Shard(0)});
    const auto view = tensor.narrow(0, 1, 2);
    expect_bit_equal(full_tensor(saved_and_loaded(view, mesh)), ramp({4}).narrow(0, 1, 2));
    tensor.mul_(5);
    expect_throws<StateError>([&] { saved_and_loaded(view, mesh); }, "torch::save: Float[2]");
  });
}

}  // namespace tessera
