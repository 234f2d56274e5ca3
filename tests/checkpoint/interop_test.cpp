// Both ways between this library and the Python packages safetensors and torch. PEER_PYTHON names a Python that has
// them: ./bazelw test //tests/checkpoint:interop_test --test_env=PEER_PYTHON=/path/to/venv/bin/python

#include <cstdlib>
#include <iostream>

#include "checkpoint/checkpoint.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/checkpoint/layouts.h"
#include "third_party/catch2/catch.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

/// Runs interop_peer.py; false, with a line that says why, where there is no Python to run it.
bool run_peer(const std::string& arguments) {
  const char* python = std::getenv("PEER_PYTHON");
  if (!python || std::system((std::string(python) + " -c 'import safetensors, torch' 2>/dev/null").c_str()) != 0) {
    std::cout << "SKIPPED: " << Catch::getResultCapture().getCurrentTestName() << ": "
              << (python ? std::string(python) + " lacks the packages safetensors and torch"
                         : "PEER_PYTHON is not set; it names a Python with the packages safetensors and torch")
              << "\n";
    return false;
  }
  const auto command = std::string(python) + " tests/checkpoint/interop_peer.py " + arguments;
  INFO(command);
  REQUIRE(std::system(command.c_str()) == 0);
  return true;
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
  const TestFolder folder;
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
  const TestFolder folder;
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
