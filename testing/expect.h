#pragma once
// Checks for test bodies that run in several threads or processes, where Catch2's assertions cannot be used. A failed
// check throws ExpectationError with the location and the values; run_ranks adds the rank.
//
//   expect_equal(mesh.ranks(), std::vector<int64_t>{0, 2});
//   expect_throws<ValueError>([&] { mesh.size(7); }, "axis 7");

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <concepts>
#include <exception>
#include <source_location>
#include <string>
#include <string_view>

#include "base/error.h"

namespace tessera {

/// Failure of a check in a test body.
class ExpectationError : public Error {
 public:
  using Error::Error;
};

namespace detail {
[[noreturn]] void expectation_failed(std::string_view what, const std::source_location& where);
void expect_message_contains(std::string_view message, std::string_view part, const std::source_location& where);
}  // namespace detail

/// Throws unless actual == expected. Prints types that fmt cannot format as "?".
template <typename Actual, typename Expected>
void expect_equal(const Actual& actual, const Expected& expected,
                  const std::source_location& where = std::source_location::current()) {
  if (actual == expected) {
    return;
  }
  if constexpr (fmt::is_formattable<Actual>::value && fmt::is_formattable<Expected>::value) {
    detail::expectation_failed(fmt::format("is {}, expected {}", actual, expected), where);
  } else {
    detail::expectation_failed("is not the expected value", where);
  }
}

/// Throws unless `action` throws a Failure whose text contains `part`.
template <std::derived_from<std::exception> Failure, typename Action>
void expect_throws(Action&& action, std::string_view part,
                   const std::source_location& where = std::source_location::current()) {
  try {
    action();
  } catch (const Failure& failure) {
    detail::expect_message_contains(failure.what(), part, where);
    return;
  }
  detail::expectation_failed(fmt::format("nothing was thrown; expected an exception with \"{}\"", part), where);
}

}  // namespace tessera

#define TESSERA_EXPECT(condition)                                                                           \
  do {                                                                                                      \
    if (!(condition)) {                                                                                     \
      ::tessera::detail::expectation_failed("does not hold: " #condition, std::source_location::current()); \
    }                                                                                                       \
  } while (false)
