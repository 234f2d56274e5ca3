#include "text/added_tokens.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"

namespace tessera::text {

AddedToken parse_added_token(const JsonView& json) {
  return {.id = json.at("id").as_id(),
          .content = json.at("content").as_string(),
          .single_word = json.at("single_word").as_bool(),
          .lstrip = json.at("lstrip").as_bool(),
          .rstrip = json.at("rstrip").as_bool(),
          .normalized = json.at("normalized").as_bool(),
          .special = json.at("special").as_bool()};
}

AddedTokenFinder::AddedTokenFinder()
    : word_(Pattern::regex(R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}])", "added_tokens")) {}

void AddedTokenFinder::add(const AddedToken& token, std::string text) {
  if (!text.empty()) {
    is_first_byte_[static_cast<unsigned char>(text[0])] = true;
    entries_.push_back({std::move(text), token});
  }
}

void AddedTokenFinder::finish() {
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
  const auto same = std::adjacent_find(entries_.begin(), entries_.end(),
                                       [](const Entry& a, const Entry& b) { return a.text == b.text; });
  TESSERA_CHECK(ValueError, same == entries_.end(), "added_tokens: ids {} and {} are both found by \"{}\"",
                same->token.id, std::next(same)->token.id, same->text);
}

/// Narrows the entries to those that match the start of `text`, byte by byte.
const AddedTokenFinder::Entry* AddedTokenFinder::longest_at(std::string_view text) const {
  const Entry* longest = nullptr;
  auto first = entries_.begin(), last = entries_.end();
  for (size_t depth = 0; depth < text.size() && first != last; ++depth) {
    const auto byte_of = [&](const Entry& entry) { return static_cast<unsigned char>(entry.text[depth]); };
    const auto byte = static_cast<unsigned char>(text[depth]);
    first =
        std::lower_bound(first, last, byte, [&](const Entry& entry, unsigned char b) { return byte_of(entry) < b; });
    last = std::upper_bound(first, last, byte, [&](unsigned char b, const Entry& entry) { return b < byte_of(entry); });
    // The shortest comes first, and ends at this depth.
    if (first != last && first->text.size() == depth + 1) {
      longest = &*first;
      ++first;
    }
  }
  return longest;
}

bool AddedTokenFinder::is_single_word(std::string_view text, Range match) const {
  const auto is_word_at = [&](size_t at) { return word_.find(text.substr(at, utf8_length(text[at])), 0).has_value(); };
  return (match.begin == 0 || !is_word_at(last_character(text.substr(0, match.begin)))) &&
         (match.end == text.size() || !is_word_at(match.end));
}

std::vector<AddedTokenFinder::Part> AddedTokenFinder::split(std::string_view text) const {
  std::vector<Part> parts;
  size_t done = 0;
  for (size_t at = 0; !entries_.empty() && at < text.size();) {
    const Entry* entry = is_first_byte_[static_cast<unsigned char>(text[at])] ? longest_at(text.substr(at)) : nullptr;
    if (!entry) {
      ++at;
      continue;
    }
    Range match{at, at + entry->text.size()};
    at = match.end;
    if (entry->token.single_word && !is_single_word(text, match)) {
      continue;
    }
    if (entry->token.lstrip) {
      match.begin = std::max(match.begin - trailing_whitespace(text.substr(0, match.begin)), done);
    }
    if (entry->token.rstrip) {
      match.end += leading_whitespace(text.substr(match.end));
    }
    if (done < match.begin) {
      parts.push_back({{done, match.begin}, std::nullopt});
    }
    parts.push_back({match, entry->token.id});
    done = match.end;
  }
  if (done < text.size()) {
    parts.push_back({{done, text.size()}, std::nullopt});
  }
  return parts;
}

}  // namespace tessera::text
