#pragma once
// Patterns of pre-tokenizers and normalizers. A pattern is a literal, or a regular expression in the syntax of Hugging
// Face's files (Oniguruma's, Ruby dialect), matched by PCRE2.

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "text/json_view.h"
#include "text/unicode.h"

struct pcre2_real_code_8;

namespace tessera::text {

struct Range {
  size_t begin = 0;
  size_t end = 0;
};

/// Immutable pattern. Thread safety: any number of threads may share it.
class Pattern {
 public:
  /// Reads {"String": ...} or {"Regex": ...}. Throws NotImplementedError for syntax that PCRE2 interprets differently
  /// than Oniguruma.
  static Pattern parse(const JsonView& json);
  /// Compiles an expression in PCRE2's syntax; `place` is for errors.
  static Pattern regex(const std::string& expression, const std::string& place);

  /// Returns the first match in `text`, which is valid UTF-8, that starts at or after `from`. Throws ValueError if
  /// matching needs too much memory or time.
  std::optional<Range> find(std::string_view text, size_t from) const;

  /// Calls use(range) for all matches from left to right, except empty ones directly after another match.
  template <class Use>
  void for_each_match(std::string_view text, Use use) const {
    size_t last_end = text.size() + 1;
    for (size_t from = 0; from <= text.size();) {
      const auto match = find(text, from);
      if (!match) {
        break;
      }
      if (match->begin == match->end && match->end == last_end) {
        from += from < text.size() ? utf8_length(text[from]) : 1;
        continue;
      }
      from = last_end = match->end;
      use(*match);
    }
  }

  /// Returns `text` with all matches replaced by `content`.
  std::string replaced(std::string_view text, std::string_view content) const;

 private:
  Pattern() = default;

  std::string text_;   // the literal or the expression
  std::string place_;  // for errors
  std::shared_ptr<const pcre2_real_code_8> code_;
  bool is_compiled_to_machine_code_ = false;
};

/// Translates an expression from Oniguruma's to PCRE2's syntax. Throws NotImplementedError like parse().
std::string pcre2_syntax(const std::string& expression, const std::string& place);

}  // namespace tessera::text
