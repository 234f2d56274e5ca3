#include "text/pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <cctype>

#include "base/error.h"

namespace tessera::text {

namespace {

// Limit for backtracking over a text of many megabytes.
constexpr size_t kMaxStackBytes = size_t{64} << 20;

/// Matching state of a thread.
struct MatchState {
  MatchState() { pcre2_jit_stack_assign(context.get(), nullptr, stack.get()); }

  std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data{pcre2_match_data_create(1, nullptr),
                                                                           pcre2_match_data_free};
  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context{pcre2_match_context_create(nullptr),
                                                                                    pcre2_match_context_free};
  std::unique_ptr<pcre2_jit_stack, decltype(&pcre2_jit_stack_free)> stack{
      pcre2_jit_stack_create(size_t{64} << 10, kMaxStackBytes, nullptr), pcre2_jit_stack_free};
};

MatchState& match_state() {
  thread_local MatchState state;
  return state;
}

std::string pcre2_message(int code) {
  PCRE2_UCHAR text[256] = {};
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

/// Translates one expression. Each method handles the syntax that starts at at_.
class Translation {
 public:
  Translation(const std::string& expression, const std::string& place) : expression_(expression), place_(place) {}

  std::string run() {
    while (at_ < expression_.size()) {
      const char c = expression_[at_];
      if (c == '\\') {
        take_escape();
      } else if (in_class_) {
        take_in_class(c);
      } else {
        take_outside(c);
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw NotImplementedError(fmt::format(
        "{}: the regular expression \"{}\" has {} at byte {}, which is not supported: Oniguruma and PCRE2 take "
        "it in different senses",
        place_, expression_, what, at_));
  }

  bool starts_with(std::string_view text) const { return expression_.compare(at_, text.size(), text) == 0; }

  void copy(size_t bytes) {
    out_ += expression_.substr(at_, bytes);
    at_ += bytes;
  }

  void replace(size_t bytes, std::string_view text) {
    out_ += text;
    at_ += bytes;
  }

  void take_members(std::string_view members) {
    replace(2, in_class_ ? std::string(members) : fmt::format("[{}]", members));
  }

  void take_escape() {
    constexpr std::string_view kSpace = R"(\t-\r\x{85}\p{Z})";
    constexpr std::string_view kWord = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\xB2\xB3\xB9\xBC-\xBE)";
    const char c = at_ + 1 < expression_.size() ? expression_[at_ + 1] : '\0';
    if (c == 's') {
      take_members(kSpace);
    } else if (c == 'w') {
      take_members(kWord);
    } else if (c == 'S') {
      // U+180E was a space in older Unicode versions, and is one for PCRE2.
      replace(2, in_class_ ? R"(\S\x{180E})" : fmt::format("[^{}]", kSpace));
    } else if (c == 'W' && !in_class_) {
      replace(2, fmt::format("[^{}]", kWord));
    } else if (c == 'u' && at_ + 6 <= expression_.size()) {
      replace(6, fmt::format("\\x{{{}}}", expression_.substr(at_ + 2, 4)));
    } else if (c == 'p' || c == 'P' || starts_with("\\x{")) {
      take_braces();
    } else if (std::string_view("dDrntfaeAz").find(c) != std::string_view::npos ||
               std::ispunct(static_cast<unsigned char>(c)) != 0) {
      copy(2);
    } else {
      refuse(fmt::format("\\{}", c));
    }
  }

  /// Handles \p{L} and \x{41}, which are equal in both. A longer name is a script, which PCRE2 alone extends to
  /// Script_Extensions.
  void take_braces() {
    const size_t open = at_ + 2, close = expression_.find('}', open);
    if (open >= expression_.size() || expression_[open] != '{' || close == std::string::npos) {
      refuse("an escape without {...}");
    }
    const auto name = expression_.substr(open + 1, close - open - 1);
    const bool is_script = expression_[at_ + 1] != 'x' && name.size() > 2;
    replace(close + 1 - at_, fmt::format("\\{}{{{}{}}}", expression_[at_ + 1], is_script ? "sc:" : "", name));
  }

  void take_in_class(char c) {
    if (c == '[') {
      refuse("[ within a class");
    } else if (starts_with("&&")) {
      refuse("&& within a class");
    }
    in_class_ = c != ']';
    copy(1);
  }

  void take_outside(char c) {
    if (c == '[') {
      in_class_ = true;
      copy(starts_with("[^") ? 2 : 1);
      if (starts_with("]")) {
        refuse("an empty class");
      }
    } else if (c == '(') {
      take_group();
    } else if (c == '^' || c == '$') {
      replace(1, c == '^' ? "(?m:^)" : "(?m:$)");
    } else if (c == '{') {
      take_interval();
    } else {
      copy(1);
    }
  }

  void take_group() {
    constexpr std::string_view kSame[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"};
    if (starts_with("(?i)") && at_ == 0) {
      return copy(4);
    }
    for (const auto start : kSame) {
      if (starts_with(start)) {
        return copy(start.size());
      }
    }
    if (starts_with("(?") || starts_with("(*")) {
      refuse(expression_.substr(at_, 3));
    }
    copy(1);
  }

  void take_interval() {
    if (starts_with("{,")) {
      refuse("{,");
    }
    size_t end = at_ + 1;
    while (end < expression_.size() &&
           (std::isdigit(static_cast<unsigned char>(expression_[end])) != 0 || expression_[end] == ',')) {
      ++end;
    }
    const auto after = expression_.substr(end, 2);
    const bool has_comma = expression_.find(',', at_) < end;
    if (after == "}+" || (after == "}?" && !has_comma)) {
      refuse(after);
    }
    copy(1);
  }

  const std::string& expression_;
  const std::string& place_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
};

}  // namespace

std::string pcre2_syntax(const std::string& expression, const std::string& place) {
  return Translation(expression, place).run();
}

Pattern Pattern::parse(const JsonView& json) {
  const auto& members = json.as_object();
  const bool is_known = members.size() == 1 && (json.has("String") || json.has("Regex"));
  TESSERA_CHECK(ValueError, is_known, "{}: is {}, must be {{\"String\": ...}} or {{\"Regex\": ...}}", json.path(),
                shown(json.value()));
  if (json.has("Regex")) {
    const auto expression = json.at("Regex");
    return regex(pcre2_syntax(expression.as_string(), expression.path()), expression.path());
  }
  Pattern pattern;
  pattern.text_ = json.at("String").as_string();
  // An empty text matches between all characters, like an empty expression.
  return pattern.text_.empty() ? regex("", json.path()) : pattern;
}

Pattern Pattern::regex(const std::string& expression, const std::string& place) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                                   PCRE2_UTF | PCRE2_UCP, &error, &offset, context.get());
  TESSERA_CHECK(ValueError, code, "{}: the regular expression \"{}\" is invalid at byte {}: {}", place, expression,
                offset, pcre2_message(error));
  Pattern pattern;
  pattern.text_ = expression;
  pattern.place_ = place;
  pattern.is_compiled_to_machine_code_ = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
  pattern.code_.reset(code, pcre2_code_free);
  return pattern;
}

std::optional<Range> Pattern::find(std::string_view text, size_t from) const {
  if (!code_) {
    const size_t found = text.find(text_, from);
    return found == std::string_view::npos ? std::nullopt : std::optional<Range>({found, found + text_.size()});
  }
  auto& state = match_state();
  const auto match = is_compiled_to_machine_code_ ? pcre2_jit_match : pcre2_match;
  const int result = match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                           PCRE2_NO_UTF_CHECK, state.data.get(), state.context.get());
  if (result == PCRE2_ERROR_NOMATCH) {
    return std::nullopt;
  }
  TESSERA_CHECK(ValueError, result >= 0, "{}: the regular expression \"{}\" gave up on {} bytes of text at byte {}: {}",
                place_, text_, text.size(), from, pcre2_message(result));
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(state.data.get());
  return Range{ends[0], ends[1]};
}

std::string Pattern::replaced(std::string_view text, std::string_view content) const {
  std::string out;
  out.reserve(text.size());
  size_t done = 0;
  for_each_match(text, [&](Range match) {
    out += text.substr(done, match.begin - done);
    out += content;
    done = match.end;
  });
  return out += text.substr(done);
}

}  // namespace tessera::text
