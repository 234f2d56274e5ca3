// What is done with the state of a model grows with the number of its parameters, and not with its square: counted in
// instructions, since times vary with what else the machine does.

#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "testing/callgrind.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("instructions grow with the number of parameters, not with its square") {
  const auto counts = run_probe("tests/checkpoint/state_cost_probe");
  if (counts.empty()) {
    return;  // it said why
  }
  const std::vector<std::pair<int, std::vector<std::string>>> steps = {
      {30,
       {"save", "async_save", "load", "optimizer_state_to_load", "get_model", "get_optimizer", "set_model",
        "set_optimizer", "save_of_ranks"}},
      {200,
       {"format_safetensors_header", "format_manifest", "format_values", "format_index", "format_shard_entries",
        "parse_safetensors_header", "parse_manifest", "parse_values", "parse_index", "parse_shard_entries",
        "make_save_plan"}}};
  for (const auto& [number, names] : steps) {
    for (const auto& name : names) {
      const double few = counts.at(fmt::format("{} {}", name, number)) / number;
      const double many = counts.at(fmt::format("{} {}", name, 4 * number)) / (4 * number);
      INFO(name << ": " << few << " instructions each of " << number << ", " << many << " each of four times as many");
      CHECK(many > 0);
      CHECK(many < 1.15 * few);  // a search in a sorted list grows as well, a little; what is squared has 4 times
    }
  }
}

}  // namespace tessera::testing
