#include "comm/context/flight_record.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/point_to_point.h"
#include "comm/reduce_op.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("the flight record has each call with its group, sizes, label and state") {
  run_ranks(3, [](int rank) {
    const auto record = FlightRecord::of_rank();
    const auto pair = rank < 2 ? new_group({1, 0}, "pair") : ProcessGroupPtr();
    const auto x = at::ones({5});
    {
      const FlightLabel outer("blocks.0");
      all_reduce(x, ReduceOp::Max, default_group());
      const FlightLabel inner(
          std::string_view("blocks.0.up, and a name that is longer than what an entry has room for"));
      all_gather(at::empty({15}), x, default_group());
    }
    auto pending = broadcast_async(x, 2, default_group());
    const auto in_flight = record->entries();
    expect_equal(in_flight.size(), size_t{3});
    expect_equal(in_flight[2].state, FlightState::Issued);
    expect_equal(in_flight[2].peer, 2);
    pending.wait();
    if (rank < 2) {
      rank == 0 ? send(x, 0, pair) : recv(x, 1, pair);
      barrier(pair);
    }
    const auto entries = record->entries();
    const auto groups = record->groups();
    expect_equal(entries.size(), size_t{rank < 2 ? 5u : 3u});
    expect_equal(entries[0].number, uint64_t{1});
    expect_equal(entries[0].group_number, uint64_t{1});
    expect_equal(entries[0].kind, Collective::AllReduce);
    expect_equal(entries[0].op, static_cast<int8_t>(ReduceOp::Max));
    expect_equal(entries[0].dtype, static_cast<int8_t>(at::kFloat));
    expect_equal(entries[0].input_numel, int64_t{5});
    expect_equal(std::string(entries[0].label.data()), std::string("blocks.0"));
    expect_equal(entries[0].state, FlightState::Done);
    expect_equal(0 < entries[0].issued_ns && entries[0].issued_ns <= entries[0].waited_ns &&
                     entries[0].waited_ns <= entries[0].ended_ns,
                 true);
    expect_equal(entries[1].group_number, uint64_t{2});
    expect_equal(entries[1].output_numel, int64_t{15});
    expect_equal(std::string(entries[1].label.data()),
                 std::string("blocks.0.up, and a name that is longer than what an entry h"));
    expect_equal(std::string(entries[2].label.data()), std::string());
    expect_equal(groups[0].name, std::string("default"));
    expect_equal(groups[0].calls, int64_t{3});
    if (rank < 2) {
      expect_equal(entries[3].kind, rank == 0 ? Collective::Send : Collective::Recv);
      expect_equal(entries[3].group_number, uint64_t{0});
      expect_equal(entries[4].group_number, uint64_t{1});
      expect_equal(groups[entries[4].group].name, std::string("pair"));
      expect_equal(groups[1].rank, 1 - rank);
      expect_equal(groups[1].size, 2);
    }
    int64_t sent = 0;
    for (const auto& group : groups) {
      sent += group.bytes_sent;
    }
    expect_equal(sent, comm_stats().bytes_sent());
  });
}

TEST_CASE("a call that fails is recorded as failed") {
  run_ranks(2, [](int rank) {
    expect_throws<CommError>([&] { all_reduce(at::ones({2 + rank}), ReduceOp::Sum, default_group()); }, "different");
    const auto entries = FlightRecord::of_rank()->entries();
    expect_equal(entries.size(), size_t{1});
    expect_equal(entries[0].state, FlightState::Failed);
  });
}

TEST_CASE("the flight record keeps the last calls, in a file too, and tells an observer") {
  const TempFolder folder;
  run_ranks(2, [&](int rank) {
    const auto record = FlightRecord::of_rank();
    barrier(default_group());
    const auto path = folder.path(std::to_string(rank));
    record->keep_in(path, rank, 2);
    int64_t seen = 0;
    record->set_observer([&](const FlightEntry& ended) { seen += ended.kind == Collective::Barrier ? 1 : 0; });
    for (int i = 0; i < 1100; ++i) {
      barrier(default_group());
    }
    record->set_observer({});
    barrier(default_group());
    expect_equal(seen, int64_t{1100});
    const auto entries = record->entries();
    expect_equal(entries.size(), kFlightCapacity);
    expect_equal(entries.front().number, uint64_t{1102 - kFlightCapacity + 1});
    expect_equal(entries.back().number, uint64_t{1102});
    expect_equal(read_file(path).substr(0, 8), std::string("TSFLIGHT"));
    expect_throws<Error>([&] { record->keep_in("/proc/none/file", rank, 2); }, "/proc/none/file");
  });
}

}  // namespace tessera::testing
