#include "text/normalizer.h"

#include <string_view>
#include <utility>

#include "text/pattern.h"
#include "text/unicode.h"

namespace tessera::text {

namespace {

void lower(Normalized& part) {
  std::string lower;
  lower.reserve(part.text.size());
  for_each_character(part.text, [&](char32_t character, size_t, size_t) { append_lower_case(lower, character); });
  part.text = std::move(lower);
}

void strip_accents(Normalized& part) {
  std::string kept;
  kept.reserve(part.text.size());
  for_each_character(part.text, [&](char32_t character, size_t offset, size_t bytes) {
    if (is_mark(character)) {
      part.at_start = part.at_start && offset > 0;
    } else {
      kept.append(part.text, offset, bytes);
    }
  });
  part.text = std::move(kept);
}

void strip(Normalized& part, bool left, bool right) {
  if (right) {
    part.text.resize(part.text.size() - trailing_whitespace(part.text));
  }
  const size_t leading = left ? leading_whitespace(part.text) : 0;
  part.text.erase(0, leading);
  part.at_start = part.at_start && leading == 0;
}

void prepend(Normalized& part, const std::string& prefix) {
  if (!part.text.empty()) {
    part.text.insert(0, prefix);
  }
}

void replace(Normalized& part, const Pattern& pattern, const std::string& content) {
  const auto first = pattern.find(part.text, 0);
  if (first && first->begin == 0 && first->end > 0) {
    // Inserted text gets the position of the match's last character.
    const size_t last = last_character(std::string_view(part.text).substr(0, first->end));
    part.at_start = part.at_start && last == 0 && !content.empty();
  }
  part.text = pattern.replaced(part.text, content);
}

void map_bytes(Normalized& part) {
  std::string mapped;
  append_byte_characters(mapped, part.text);
  part.text = std::move(mapped);
}

Normalizer parse_normalizer(const JsonView& json) {
  const auto& type = json.at("type").as_string();
  constexpr std::pair<const char*, NormalForm> kForms[] = {
      {"NFC", NormalForm::kNfc}, {"NFD", NormalForm::kNfd}, {"NFKC", NormalForm::kNfkc}, {"NFKD", NormalForm::kNfkd}};
  for (const auto& [name, form] : kForms) {
    if (type == name) {
      return [form = form](Normalized& part) { part.text = normal_form(part.text, form); };
    }
  }
  if (type == "Lowercase") {
    return lower;
  }
  if (type == "StripAccents") {
    return strip_accents;
  }
  if (type == "Strip") {
    return [left = json.at("strip_left").as_bool(), right = json.at("strip_right").as_bool()](Normalized& part) {
      strip(part, left, right);
    };
  }
  if (type == "Prepend") {
    return [prefix = json.at("prepend").as_string()](Normalized& part) { prepend(part, prefix); };
  }
  if (type == "Replace") {
    return [pattern = Pattern::parse(json.at("pattern")), content = json.at("content").as_string()](Normalized& part) {
      replace(part, pattern, content);
    };
  }
  if (type == "ByteLevel") {
    return map_bytes;
  }
  refuse_type(json, "NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, Prepend, Replace, ByteLevel, Sequence");
}

}  // namespace

std::vector<Normalizer> parse_normalizers(const JsonView& json) {
  std::vector<Normalizer> steps;
  for (const auto& step : steps_of(json, "normalizers")) {
    steps.push_back(parse_normalizer(step));
  }
  return steps;
}

}  // namespace tessera::text
