#include "testing/expect.h"

namespace tessera::detail {

void expectation_failed(std::string_view what, const std::source_location& where) {
  throw ExpectationError(fmt::format("{}:{}: {}", where.file_name(), where.line(), what));
}

void expect_message_contains(std::string_view message, std::string_view part, const std::source_location& where) {
  if (message.find(part) == std::string_view::npos) {
    expectation_failed(fmt::format("the exception says \"{}\"; expected it to contain \"{}\"", message, part), where);
  }
}

}  // namespace tessera::detail
