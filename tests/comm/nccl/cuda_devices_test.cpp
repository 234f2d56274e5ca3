#include "comm/nccl/cuda_devices.h"

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;
using Reports = std::vector<DeviceReport>;
using Devices = std::vector<int>;

/// What is wrong with the reports; NoDeviceError is told apart by its first letter.
std::string fault(const Reports& reports) {
  try {
    choose_devices(reports);
  } catch (const NoDeviceError& failure) {
    return std::string("N ") + failure.what();
  } catch (const ValueError& failure) {
    return std::string("V ") + failure.what();
  }
  return "none";
}

TEST_CASE("each rank takes the GPU of its number on its host") {
  CHECK(choose_devices({{.host = "a", .local_rank = 0, .devices = {"A0", "A1"}},
                        {.host = "a", .local_rank = 1, .devices = {"A0", "A1"}},
                        {.host = "b", .local_rank = 0, .devices = {"B0"}}}) == Devices{0, 1, 0});
}

TEST_CASE("the number is counted where no launcher tells it") {
  CHECK(choose_devices({{.host = "a", .devices = {"A0", "A1"}},
                        {.host = "b", .devices = {"B0", "B1", "B2"}},
                        {.host = "a", .devices = {"A0", "A1"}},
                        {.host = "b", .devices = {"B0", "B1", "B2"}},
                        {.host = "b", .devices = {"B0", "B1", "B2"}}}) == Devices{0, 0, 1, 1, 2});
}

TEST_CASE("a launcher that shows each process its own GPU") {
  CHECK(choose_devices({{.host = "a", .local_rank = 0, .devices = {"A0"}},
                        {.host = "a", .local_rank = 1, .devices = {"A1"}},
                        {.host = "a", .local_rank = 2, .devices = {"A2"}}}) == Devices{0, 0, 0});
}

TEST_CASE("a wish comes first") {
  CHECK(choose_devices({{.host = "a", .local_rank = 0, .wish = 1, .devices = {"A0", "A1"}},
                        {.host = "a", .local_rank = 1, .wish = 0, .devices = {"A0", "A1"}}}) == Devices{1, 0});
  CHECK_THAT(
      fault({{.host = "a", .local_rank = 0, .wish = 2, .devices = {"A0", "A1"}}}),
      ContainsSubstring("V ") && ContainsSubstring("rank 0 would take GPU 2, which NcclOptions::device asks for, "
                                                   "but sees 2"));
}

TEST_CASE("a rank without a GPU is named with the reason") {
  const Reports one{{.host = "a", .local_rank = 0, .devices = {"A0"}},
                    {.host = "b", .local_rank = 0, .reason = "no CUDA device is visible: no driver"}};
  CHECK_THAT(fault(one), ContainsSubstring("N init_process_group: backend \"nccl\" needs a GPU for each of 2 ranks; "
                                           "rank 1: no CUDA device is visible: no driver"));
  const Reports both{{.host = "a", .reason = "none"}, {.host = "a", .reason = "other"}};
  CHECK_THAT(fault(both), ContainsSubstring("ranks 0, 1: none"));
}

TEST_CASE("more ranks on a host than GPUs") {
  CHECK_THAT(fault({{.host = "a", .local_rank = 0, .devices = {"A0", "A1"}},
                    {.host = "a", .local_rank = 1, .devices = {"A0", "A1"}},
                    {.host = "a", .local_rank = 2, .devices = {"A0", "A1"}}}),
             ContainsSubstring("V ") &&
                 ContainsSubstring("rank 2 would take GPU 2, its number on its host, but sees 2; "
                                   "start at most as many ranks") &&
                 ContainsSubstring("set TESSERA_SHARE_GPUS=1 for all ranks"));
  CHECK_THAT(
      fault({{.host = "a", .local_rank = 0, .devices = {"A0"}}, {.host = "a", .local_rank = 1, .devices = {"A0"}}}),
      ContainsSubstring("V ") && ContainsSubstring("ranks 0 and 1 would share GPU A0"));
  CHECK_THAT(fault({{.devices = {"A0", "A1"}}, {.devices = {"A0", "A1"}}}),
             ContainsSubstring("ranks 0 and 1 would share GPU A0"));
}

TEST_CASE("ranks that share GPUs take them in turn, where all of them may") {
  const std::vector<std::string> two{"A0", "A1"};
  CHECK(choose_devices({{.host = "a", .local_rank = 0, .shares = true, .devices = two},
                        {.host = "a", .local_rank = 1, .shares = true, .devices = two},
                        {.host = "a", .local_rank = 2, .shares = true, .devices = two},
                        {.host = "a", .local_rank = 3, .shares = true, .devices = two},
                        {.host = "b", .local_rank = 0, .shares = true, .devices = {"B0"}},
                        {.host = "b", .local_rank = 1, .shares = true, .devices = {"B0"}}}) ==
        Devices{0, 1, 0, 1, 0, 0});
  CHECK_THAT(fault({{.host = "a", .local_rank = 0, .shares = true, .devices = {"A0"}},
                    {.host = "a", .local_rank = 1, .devices = {"A0"}}}),
             ContainsSubstring("V ") && ContainsSubstring("ranks 0 and 1 would share GPU A0") &&
                 ContainsSubstring("set TESSERA_SHARE_GPUS=1 for all ranks"));
}

TEST_CASE("every rank gets the reports of all, and so decides alike") {
  const Reports reports{
      {.host = "a/b/0", .local_rank = 0, .wish = 1, .devices = {"GPU-1", "GPU-2"}},
      {.host = "", .local_rank = -1, .wish = -1, .reason = "no CUDA device: a reason with blanks, \"x\""},
      {.host = "a/b/0", .local_rank = 7, .shares = true, .devices = {"GPU-9"}}};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Reports> seen(3);
  std::vector<std::string> faults(3);
  std::vector<std::thread> ranks;
  ranks.reserve(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      seen[rank] = exchange_reports(*store, rank, 3, reports[rank]);
      faults[rank] = fault(seen[rank]);
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  for (int rank = 0; rank < 3; ++rank) {
    CHECK((seen[rank] == reports));
    CHECK(faults[rank] == faults[0]);
  }
  CHECK_THAT(faults[0],
             ContainsSubstring("N ") && ContainsSubstring("rank 1: no CUDA device: a reason with blanks, \"x\""));
}

TEST_CASE("an entry of somebody else in the store") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("devices/1", std::vector<uint8_t>{'x'});
  store->set("devices/all_left", std::vector<uint8_t>{'1'});
  CHECK_THROWS_WITH(exchange_reports(*store, 0, 2, {}), ContainsSubstring("\"x\" reports no devices"));
}

}  // namespace
}  // namespace tessera
