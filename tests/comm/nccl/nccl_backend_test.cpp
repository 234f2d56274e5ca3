// NCCL under --config=cuda. Without a GPU: what is refused, alike on every rank. With one: every collective in a group
// of one rank, through NCCL, and two ranks, which share it where there is no second, against values computed by hand.

#include "comm/nccl/nccl_backend.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "testing/expect.h"
#include "testing/run_processes.h"
#include "testing/temp_folder.h"
#include "tests/cuda/gpu_test.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

constexpr const char* kMixed = "cpu:gloo,cuda:nccl";

at::TensorOptions on_gpu(at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions(at::kCUDA).dtype(dtype);
}

TEST_CASE("the header of NCCL is the one that libtorch was built with, and a rank without a GPU says why") {
  const DeviceReport report = report_devices(3, -1);
  CHECK(report.local_rank == 3);
  CHECK(report.devices.size() == static_cast<size_t>(cuda::visible_devices()));
  if (report.devices.empty()) {
    CHECK_THAT(report.reason, ContainsSubstring("no CUDA device is visible"));
  }
}

TEST_CASE("a single rank without a GPU") {
  if (cuda::skip_with_devices()) {
    return;
  }
  const RankContextGuard guard{RankContext::create()};
  for (const char* backend : {"nccl", kMixed}) {
    const ProcessGroupOptions options{.backend = backend, .rank = 0, .world_size = 1};
    CHECK_THROWS_AS(init_process_group(options), NoDeviceError);
    CHECK_THROWS_WITH(init_process_group(options),
                      ContainsSubstring("rank 0: no CUDA device is visible") && ContainsSubstring("nvidia-smi"));
  }
  CHECK_FALSE(is_initialized());
}

TEST_CASE("ranks as threads cannot have NCCL") {
  const RankContextGuard guard{RankContext::create()};
  CHECK_THROWS_WITH(init_process_group({.backend = "cpu:threads,cuda:nccl", .rank = 0, .world_size = 1}),
                    ContainsSubstring("NCCL needs ranks as processes"));
}

TEST_CASE("two ranks without GPUs get the same error, and neither waits for the other") {
  if (cuda::skip_with_devices()) {
    return;
  }
  run_processes(2, [](int rank) {
    // Both ranks are children of one launcher.
    const auto file =
        std::filesystem::temp_directory_path() / fmt::format("{}_{}", getppid(), std::getenv("MASTER_PORT"));
    const RankContextGuard guard{RankContext::create()};
    expect_throws<NoDeviceError>(
        [&] {
          init_process_group(
              {.backend = kMixed,
               .rank = rank,
               .world_size = 2,
               .store = c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::FileStore>(file.string(), 2))});
        },
        "needs a GPU for each of 2 ranks; ranks 0, 1: no CUDA device is visible");
  });
}

TEST_CASE("tests of ranks that need GPUs are skipped without them") {
  if (cuda::skip_with_devices()) {
    return;
  }
  const auto result = try_run_processes(2, [](int) { throw Error("must not run"); }, {.backend = kMixed});
  CHECK(result.skipped);
  CHECK(std::ranges::any_of(result.outputs, [](const std::string& output) {
    return output.find("skipped: init_process_group: backend \"nccl\" needs a GPU") != std::string::npos;
  }));
}

/// Every collective of the backend itself: collectives.h touches none for a group of one rank.
TEST_CASE("a group of one rank, through NCCL") {
  if (cuda::skip_without_devices(1)) {
    return;
  }
  const auto backend =
      make_nccl_backend({.info = {.name = "one", .ranks = {0}, .timeout = std::chrono::seconds(60)},
                         .store = c10::make_intrusive<c10d::HashStore>(),
                         .nccl = {.high_priority_stream = true, .separate_reduce_scatter = GENERATE(false, true)}});
  CHECK(backend->getBackendName() == "nccl");
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kComplexFloat, at::kShort}) {
    CAPTURE(dtype);
    at::Tensor input = at::arange(6, on_gpu(at::kFloat)).to(dtype), output = at::zeros({6}, on_gpu(dtype));
    backend->_allgather_base(output, input, {})->wait();
    CHECK(output.equal(input));
    output.zero_();
    std::vector<int64_t> splits;
    backend->alltoall_base(output, input, splits, splits, {})->wait();
    CHECK(output.equal(input));
    at::Tensor other_dtype = at::zeros({6}, on_gpu(at::kDouble)), longer = at::zeros({7}, on_gpu(dtype));
    CHECK_THROWS_AS(backend->alltoall_base(other_dtype, input, splits, splits, {}), ValueError);
    CHECK_THROWS_AS(backend->alltoall_base(longer, input, splits, splits, {}), ValueError);
    std::vector<at::Tensor> one = {output};
    backend->broadcast(one, {})->wait();
    CHECK(output.equal(input));
    if (dtype == at::kShort) {
      CHECK_THROWS_AS(backend->allreduce(one, {}), NotImplementedError);
      continue;
    }
    backend->allreduce(one, {})->wait();
    CHECK(output.equal(input));
    output.zero_();
    backend->_reduce_scatter_base(output, input, {})->wait();
    CHECK(output.equal(input));
  }
  at::Tensor none = at::zeros({0}, on_gpu());
  backend->_allgather_base(none, none, {})->wait();
  backend->barrier({})->wait();
  at::Tensor host = at::zeros({2});
  CHECK_THROWS_WITH(backend->_allgather_base(host, host, {}), ContainsSubstring("a tensor on cpu; this rank's GPU"));
  CHECK_THAT(nccl_flight_record(), ContainsSubstring("entries"));
}

/// Two ranks over NCCL, which share the GPU where there is one alone.
void run_two_ranks(const std::function<void(int rank)>& body,
                   std::vector<std::pair<std::string, std::string>> environment = {}) {
  environment.emplace_back("TESSERA_SHARE_GPUS", cuda::visible_devices() < 2 ? "1" : "0");
  run_processes(2, body, {.backend = kMixed, .timeout = std::chrono::seconds(120), .environment = environment});
}

TEST_CASE("two ranks over NCCL, with gloo beside it") {
  if (cuda::skip_without_devices(1)) {
    return;
  }
  run_two_ranks([](int rank) {
    const ProcessGroupPtr& group = default_group();
    expect_equal(get_backend(group), std::string(kMixed));
    at::Tensor input = at::full({2}, rank + 1.f, on_gpu()), gathered = at::zeros({4}, on_gpu());
    expect_equal(static_cast<int>(input.get_device()), rank % cuda::visible_devices());
    all_gather(gathered, input, group);
    TESSERA_EXPECT(gathered.cpu().equal(at::tensor({1.f, 1.f, 2.f, 2.f})));
    at::Tensor part = at::zeros({2}, on_gpu());
    reduce_scatter(part, at::arange(4, on_gpu()) * (rank + 1), ReduceOp::Sum, group);
    TESSERA_EXPECT(part.cpu().equal(at::arange(2, at::kFloat).add(2 * rank).mul(3)));
    all_reduce(input, ReduceOp::Avg, group);
    TESSERA_EXPECT(input.cpu().equal(at::full({2}, 1.5f)));
    at::Tensor largest = at::tensor({1.f, rank == 0 ? NAN : 5.f, rank == 1 ? 7.f : 3.f}).cuda();
    all_reduce(largest, ReduceOp::Max, group);
    TESSERA_EXPECT(largest.cpu().allclose(at::tensor({1.f, NAN, 7.f}), 0, 0, /*equal_nan=*/true));
    at::Tensor on_host = at::full({1}, rank + 1.f);
    all_reduce(on_host, ReduceOp::Sum, group);
    expect_equal(on_host.item<float>(), 3.f);
    const ProcessGroupPtr other = new_group({1, 0}, "other", {.separate_reduce_scatter = true});
    at::Tensor sent = at::full({3}, static_cast<float>(rank), on_gpu());
    broadcast(sent, 0, other);
    TESSERA_EXPECT(sent.cpu().equal(at::full({3}, 1.f)));
    at::Tensor scattered = at::zeros({1}, on_gpu());
    reduce_scatter(scattered, at::full({2}, 1.f + static_cast<float>(rank), on_gpu()), ReduceOp::Sum, other);
    TESSERA_EXPECT(scattered.cpu().equal(at::full({1}, 3.f)));
    barrier(other);
  });
}

/// Whose first collective, which connects the ranks, is over.
ProcessGroupPtr connected_group(const std::string& name) {
  ProcessGroupPtr group = new_group({0, 1}, name);
  all_reduce(at::zeros({1}, on_gpu()), ReduceOp::Sum, group);
  return group;
}

TEST_CASE("two ranks over NCCL: a peer that does not come is an error after the time-out, and the process lives on") {
  if (cuda::skip_without_devices(1)) {
    return;
  }
  const testing::TempFolder folder;
  run_two_ranks(
      [](int rank) {
        const ProcessGroupPtr group = connected_group("late");
        group->getBackend(c10::kCUDA)->setTimeout(std::chrono::seconds(5));
        if (rank == 1) {
          const at::Tensor tensor = at::zeros({1}, on_gpu());
          expect_throws<CommError>(
              [&] {
                for (int attempt = 0; attempt < 120; ++attempt) {
                  all_reduce(tensor, ReduceOp::Sum, group);
                  tensor.cpu();
                }
              },
              "group 'late'");
        }
        std::this_thread::sleep_for(std::chrono::seconds(45));  // the monitor wakes up meanwhile
      },
      // libtorch waits four times the first for its flight record before it aborts; its monitor sleeps for the
      // second after it, and would then end the process.
      {{"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000"},
       {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "15"},
       {"TORCH_FR_DUMP_TEMP_FILE", folder.path("record")}});
  CHECK(std::filesystem::exists(folder.path("record1")));  // of the rank that waited
}

TEST_CASE("two ranks over NCCL: a group that an exception ends does not wait for a peer that does not come") {
  if (cuda::skip_without_devices(1)) {
    return;
  }
  run_two_ranks([](int rank) {
    if (rank == 0) {
      connected_group("left");
      return;
    }
    expect_throws<ValueError>(
        [] {
          const ProcessGroupPtr group = connected_group("left");
          const at::Tensor tensor = at::zeros({1}, on_gpu());
          const Pending pending = all_reduce_async(tensor, ReduceOp::Sum, group);
          throw ValueError("as an op of the rank does");
        },
        "as an op of the rank does");
  });
}

}  // namespace
}  // namespace tessera
