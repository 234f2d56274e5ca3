#pragma once
// Reports failures in destructors and library threads, which cannot throw.

#include <fmt/format.h>

#include <cstdio>
#include <utility>

namespace tessera {

/// Writes a line to stderr, and ignores errors in doing so. Thread safety: any thread.
template <class... Args>
void report_failure(fmt::format_string<Args...> format, Args&&... args) noexcept {
  try {
    fmt::print(stderr, "{}\n", fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // stderr is closed, or memory is exhausted
  }
}

}  // namespace tessera
