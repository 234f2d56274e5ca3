#pragma once
// The machine's Catch2: 2.13 (Debian 12, header-only) or 3 (Debian 13, Ubuntu 24.04). Tests use what both have, under
// the names of Catch2 3. One source file, testing/test_main.cpp, defines CATCH_CONFIG_RUNNER before including this.

#if __has_include(<catch2/catch_all.hpp>)

#include <catch2/catch_all.hpp>

#else

#include <catch2/catch.hpp>
#include <string>

namespace Catch {

using Detail::Approx;

namespace Matchers {

/// Catch2 3's name for the substring matcher.
inline auto ContainsSubstring(const std::string& part) {
  return Contains(part);
}

}  // namespace Matchers
}  // namespace Catch

#endif
