#include "testing/fsdp_models/run_subtests.h"

#include <fmt/ranges.h>

#include "comm/collectives.h"
#include "testing/expect.h"

namespace tessera::testing {

namespace {

std::string value_text(const SubtestValue& value) {
  return std::visit([](const auto& held) { return fmt::format("{}", held); }, value);
}

}  // namespace

std::string Subtest::to_string() const {
  std::vector<std::string> parts;
  for (const auto& [name, value] : values_) {
    parts.push_back(name + "=" + value_text(value));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

const SubtestValue& Subtest::at(const std::string& name) const {
  for (const auto& [own, value] : values_) {
    if (own == name) {
      return value;
    }
  }
  throw KeyError(fmt::format("Subtest: no axis '{}' in {}", name, to_string()));
}

int64_t run_subtests(const std::vector<SubtestAxis>& config, const std::function<void(const Subtest&)>& run) {
  int64_t count = 1;
  for (const auto& axis : config) {
    count *= static_cast<int64_t>(axis.values.size());
  }
  for (int64_t i = 0; i < count; ++i) {
    std::vector<std::pair<std::string, SubtestValue>> values(config.size());
    int64_t rest = i;
    for (size_t axis = config.size(); axis-- > 0;) {
      const auto size = static_cast<int64_t>(config[axis].values.size());
      values[axis] = {config[axis].name, config[axis].values[static_cast<size_t>(rest % size)]};
      rest /= size;
    }
    const Subtest subtest(std::move(values));
    try {
      run(subtest);
    } catch (const std::exception& failure) {
      throw ExpectationError(fmt::format("subtest {}: {}", subtest.to_string(), failure.what()));
    }
    barrier(default_group());
  }
  return count;
}

}  // namespace tessera::testing
