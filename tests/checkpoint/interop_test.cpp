// Both ways between this library and the Python packages safetensors and torch.

#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

bool run_peer(const std::string& arguments) {
  return run_peer_python("safetensors, torch", "tests/checkpoint/interop_peer.py", arguments);
}

/// What the peer writes and expects: element i of a tensor is i, times its factor.
dcp::StateDict numbered(bool zero) {
  const auto make = [&](at::IntArrayRef sizes, double factor, at::ScalarType dtype) {
    return zero ? at::zeros(sizes, dtype) : (at::arange(c10::multiply_integers(sizes)) * factor).view(sizes).to(dtype);
  };
  return {{"in.weight", make({5, 7}, 0.5, at::kFloat)},
          {"in.bias", make({5}, 1, at::kBFloat16)},
          {"scalar", make({}, 1, at::kDouble)},
          {"count", make({3}, 1, at::kLong)}};
}

void expect_numbered(const dcp::State& state) {
  for (const auto& [key, value] : numbered(false)) {
    expect_bit_equal(std::get<at::Tensor>(state.model.at(key)), std::get<at::Tensor>(value));
  }
}

}  // namespace

TEST_CASE("safetensors and torch's Hugging Face reader read our folders") {
  const TempFolder folder;
  const auto path = folder.path("ours");
  run_ranks(3, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {3}, {"dp"});
    auto model = numbered(false);
    model["in.weight"] = distribute_tensor(std::get<at::Tensor>(model["in.weight"]), mesh, {Shard(1)});
    dcp::save(path,
              {.model = model, .optimizer = {{"state.in.bias.exp_avg", at::ones({5})}}, .user = {{"step", int64_t{1}}}},
              {.max_file_bytes = 150});
    dcp::export_safetensors(folder.path("one.safetensors"), model);
  });
  run_peer("read " + path + " " + folder.path("one.safetensors"));
}

TEST_CASE("we read what safetensors and torch's Hugging Face writer write") {
  const TempFolder folder;
  if (!run_peer("write " + folder.path(""))) {
    return;
  }
  for (const std::string name : {"single.safetensors", "dcp", "dcp_sharded", "hf"}) {
    INFO(name);
    run_ranks(2, [&](int) {
      dcp::State state{.model = numbered(true)};
      const auto mesh = init_device_mesh(at::kCPU, {2}, {"dp"});
      state.model["in.weight"] = distribute_tensor(at::zeros({5, 7}), mesh, {Shard(0)});
      dcp::load(folder.path(name), state);
      expect_numbered(state);
    });
  }
}

}  // namespace tessera::testing
