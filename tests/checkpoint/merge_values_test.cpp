// Values that ranks save together: what they share, what each has alone, and where they disagree.

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpointer.h"
#include "comm/context/comm_stats.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int kShared = 1000;

/// What ranks share, some of what ranks 1 and 2 have and rank 0 has not, and a text of each rank's own.
dcp::State state_of(int rank) {
  dcp::State state;
  for (int i = 0; i < kShared; ++i) {
    state.optimizer[fmt::format("param_groups.layers.{}.weight.lr", i)] = 0.1 * i;
  }
  if (rank > 0) {
    state.user["of two"] = int64_t{7};
  }
  state.user["loss"] = rank == 1 ? -std::nan("") : std::nan("");
  state.user[fmt::format("rng.{}", rank)] = std::string("drawn by ") + std::to_string(rank);
  return state;
}

}  // namespace

TEST_CASE("a checkpoint has the values of all ranks; those that ranks share are not sent as text") {
  const TempFolder folder;
  run_ranks(3, [&](int rank) {
    dcp::Checkpointer checkpointer(folder.path("run"));
    reset_comm_stats();
    checkpointer.async_save(1, state_of(rank));
    // 8 bytes each, from rank 0 to the others, and what is not shared.
    TESSERA_EXPECT(comm_stats().bytes_sent() < (rank == 0 ? 2 * 8 * kShared : 0) + 2000);
    checkpointer.wait();
    auto expected = state_of(0);
    for (const int other : {1, 2}) expected.user.merge(state_of(other).user);
    auto loaded = expected;
    for (auto* section : {&loaded.optimizer, &loaded.user}) {
      for (auto& [key, value] : *section) {
        value = std::holds_alternative<double>(value)    ? dcp::StateValue(-1.0)
                : std::holds_alternative<int64_t>(value) ? dcp::StateValue(int64_t{-1})
                                                         : dcp::StateValue(std::string());
      }
    }
    dcp::load(checkpointer.checkpoint_path(1), loaded);
    for (const auto& [key, value] : expected.optimizer) {
      TESSERA_EXPECT(std::get<double>(loaded.optimizer[key]) == std::get<double>(value));
    }
    TESSERA_EXPECT(std::isnan(std::get<double>(loaded.user["loss"])));
    expect_equal(std::get<int64_t>(loaded.user["of two"]), 7);
    for (const int other : {0, 1, 2}) {
      expect_equal(std::get<std::string>(loaded.user[fmt::format("rng.{}", other)]), fmt::format("drawn by {}", other));
    }
  });
}

TEST_CASE("one key with two values is an error on every rank, whichever ranks have them") {
  const TempFolder folder;
  run_ranks(4, [&](int rank) {
    dcp::Checkpointer checkpointer(folder.path("run"));
    const auto refused = [&](const char* key, const dcp::StateDict& user, const std::string& message) {
      auto state = state_of(rank);
      for (const auto& [name, value] : user) state.user[name] = value;
      expect_throws<ValueError>([&] { checkpointer.async_save(1, state); },
                                fmt::format("save: 'user.{}' differs between ranks: {}", key, message));
    };
    const auto only = [&](std::initializer_list<int> ranks, const char* key, auto value) {
      return std::ranges::find(ranks, rank) == ranks.end() ? dcp::StateDict() : dcp::StateDict{{key, value}};
    };
    refused("of two", only({2}, "of two", int64_t{8}),
            R"(rank 1 has {"user":{"of two":{"int":7}}}, rank 2 has {"user":{"of two":{"int":8}}})");
    refused("of two", only({3}, "of two", 7.0),
            R"(rank 1 has {"user":{"of two":{"int":7}}}, rank 3 has {"user":{"of two":{"double":"0x1.cp+2"}}})");
    refused("rng.0", only({3}, "rng.0", std::string("x")), R"(rank 0 has {"user":{"rng.0":{"string":"drawn by 0"}}})");
    refused("loss", only({3}, "loss", 0.0), R"(rank 0 has {"user":{"loss":{"double":"nan"}}}, rank 3 has)");
    checkpointer.wait();
  });
  CHECK(!std::filesystem::exists(folder.path("run")));
}

}  // namespace tessera::testing
