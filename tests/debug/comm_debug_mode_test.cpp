#include "debug/comm_debug_mode.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>

#include "comm/point_to_point.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "nn/modules.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

/// Runs of blanks as one.
std::string squeezed(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c != ' ' || (!result.empty() && result.back() != ' ')) {
      result += c;
    }
  }
  return result;
}

}  // namespace

TEST_CASE("collectives are counted by module, phase, op and kind", "[debug]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    nn::Sequential model(nn::Linear(3, 2), nn::ReLU(), nn::Linear(2, 3));
    for (const auto& child : model->children()) {
      if (!child->parameters().empty()) {
        fully_shard(*child, {.mesh = mesh});
      }
    }
    fully_shard(model, {.mesh = mesh});
    CommDebugMode mode(*model);
    model->forward(at::ones({4, 3})).sum().backward();
    expect_equal(mode.calls(Collective::AllGather), 4);  // each unit's forward and backward
    expect_equal(mode.calls(Collective::ReduceScatter), 2);
    const auto gather =
        mode.entries().at({.module = "0", .backward = false, .op = "", .collective = Collective::AllGather});
    expect_equal(gather.calls, 1);
    expect_equal(mode.calls(), 6);
  });
}

TEST_CASE("a collective that an op's operands need is counted under the op", "[debug]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto rows = distribute_tensor(at::ones({4, 4}), mesh, {Shard(0)});
    const auto columns = distribute_tensor(at::ones({4, 4}), mesh, {Shard(1)});
    std::string table;
    {
      CommDebugMode mode;
      const auto sum = rows + columns;
      redistribute(sum, {Replicate()});
      table = mode.to_string();
    }
    expect_equal(squeezed(table), std::string("module phase op collective calls bytes sent\n"
                                              "- forward - all_gather 1 32\n"
                                              "- forward aten::add.Tensor all_to_all 1 16\n"
                                              "total 2 48\n"));
    CommDebugMode after;
    expect_equal(after.calls(), 0);
  });
}

TEST_CASE("messages between two ranks are counted beside collectives", "[debug]") {
  run_ranks(2, [](int rank) {
    CommDebugMode mode;
    const auto tensor = at::ones({6});
    rank == 0 ? send(tensor, 1, default_group()) : recv(tensor, 0, default_group());
    expect_equal(squeezed(mode.to_string()),
                 rank == 0
                     ? std::string("module phase op collective calls bytes sent\n- forward - send 1 24\ntotal 1 24\n")
                     : std::string("module phase op collective calls bytes sent\n- forward - recv 1 0\ntotal 1 0\n"));
  });
}

}  // namespace tessera
