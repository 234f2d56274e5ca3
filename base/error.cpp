#include "base/error.h"

namespace tessera::detail {

void assertion_failed(const char* condition, const char* file, int line, const std::string& message) {
  throw AssertionError(fmt::format("{}:{}: invariant `{}` does not hold: {}", file, line, condition, message));
}

}  // namespace tessera::detail
