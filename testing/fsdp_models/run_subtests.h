#pragma once
// Runs the cross product of a test's parameters on the ranks' existing groups.
//
//   run_ranks(2, [](int rank) {
//     run_subtests({{"reshard", {true, false}}, {"dim", {3, 16}}, {"dtype", {"bf16"}}}, [&](const Subtest& subtest) {
//       check(subtest.get<bool>("reshard"), subtest.get<int64_t>("dim"), subtest.get<std::string>("dtype"));
//     });
//   });
//
// The first axis changes slowest. After each combination there is a barrier over the default group. A failing
// combination ends the test with its values in the message, and run_ranks wakes the other ranks.
// Source: run_subtests in torch/testing/_internal/common_fsdp.py.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace tessera::testing {

using SubtestValue = std::variant<bool, int64_t, double, std::string>;

struct SubtestAxis {
  std::string name;
  std::vector<SubtestValue> values;
};

/// One combination.
class Subtest {
 public:
  explicit Subtest(std::vector<std::pair<std::string, SubtestValue>> values) : values_(std::move(values)) {}

  /// Throws KeyError for an unknown name, and ValueError for another type than the axis has.
  template <class T>
  const T& get(const std::string& name) const {
    const auto* value = std::get_if<T>(&at(name));
    TESSERA_CHECK(ValueError, value != nullptr, "Subtest: '{}' is of another type than the one asked for; this is {}",
                  name, to_string());
    return *value;
  }
  /// Returns a text such as "reshard=true, dim=3".
  std::string to_string() const;

 private:
  const SubtestValue& at(const std::string& name) const;

  std::vector<std::pair<std::string, SubtestValue>> values_;
};

/// Calls `run` for every combination on every rank, and returns their number. Throws ExpectationError, naming the
/// failed combination and its error. All ranks must call it.
int64_t run_subtests(const std::vector<SubtestAxis>& config, const std::function<void(const Subtest&)>& run);

}  // namespace tessera::testing
