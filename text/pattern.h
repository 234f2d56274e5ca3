#pragma once
// What pre-tokenizers and normalizers look for: a text, or a regular expression of the kind that Hugging Face's files
// have (Oniguruma's, in its Ruby syntax), which PCRE2 matches.

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

/// An immutable pattern. Threads may use one at the same time.
class Pattern {
 public:
  /// Reads {"String": ...} or {"Regex": ...}. Throws NotImplementedError for what PCRE2 takes in another sense than
  /// Oniguruma.
  static Pattern parse(const JsonView& json);
  /// Takes an expression in PCRE2's syntax; `place` is for errors.
  static Pattern regex(const std::string& expression, const std::string& place);

  /// Returns the first match in `text`, valid UTF-8, that starts at `from` or later. Throws ValueError if the
  /// expression needs too much memory or time.
  std::optional<Range> find(std::string_view text, size_t from) const;

  /// Calls use(range) for all matches from left to right. An empty one right after another match is none.
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

  /// Returns `text` with `content` in place of all matches.
  std::string replaced(std::string_view text, std::string_view content) const;

 private:
  Pattern() = default;

  std::string text_;   // looked for, or the expression
  std::string place_;  // for errors
  std::shared_ptr<const pcre2_real_code_8> code_;
  bool is_compiled_to_machine_code_ = false;
};

/// Returns an expression of Oniguruma in PCRE2's syntax. Throws NotImplementedError as parse() does.
std::string pcre2_syntax(const std::string& expression, const std::string& place);

}  // namespace tessera::text
