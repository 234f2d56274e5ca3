#include "models/config_reader.h"

#include "checkpoint/format/json_text.h"
#include "checkpoint/io/file_io.h"

namespace tessera::models {

namespace {

constexpr uint64_t kMaxBytes = uint64_t{16} << 20;
constexpr int kMaxDepth = 32;

}  // namespace

std::string read_config_text(const std::string& file) {
  return dcp::read_text(file, kMaxBytes);
}

Json parse_config_object(std::string_view text, const std::string& file) {
  dcp::check_json_depth(text, file, kMaxDepth);
  Json whole;
  try {
    whole = Json::parse(text.begin(), text.end());
  } catch (const Json::exception& error) {
    throw ValueError(fmt::format("{}: no JSON ({})", file, error.what()));
  }
  TESSERA_CHECK(ValueError, whole.is_object(), "{}: is {}; it must be an object", file, shown(whole));
  return whole;
}

std::string shown(const Json& value) {
  std::string text = value.dump();
  if (text.size() > 80) {
    text.resize(80);
    text += "...";
  }
  return text;
}

void check_size(const char* name, int64_t size, int64_t most) {
  TESSERA_CHECK(ValueError, size >= 1 && size <= most, "DecoderConfig: {} is {}; it must be from 1 to {}", name, size,
                most);
}

void KeyReader::fail(std::string_view key, const std::string& allowed) const {
  const auto found = object_.find(key);
  throw ValueError(found == object_.end()
                       ? fmt::format("{}{} is missing; it must be {}", place_, key, allowed)
                       : fmt::format("{}{} is {}; it must be {}", place_, key, shown(*found), allowed));
}

const Json* KeyReader::find(std::string_view key) {
  read_.emplace(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<int64_t> KeyReader::find_integer(std::string_view key, int64_t least, int64_t most) {
  const Json* const value = find(key);
  if (!value) {
    return std::nullopt;
  }
  if (!value->is_number_integer() || value->get<double>() < static_cast<double>(least) ||
      value->get<double>() > static_cast<double>(most)) {
    fail(key, fmt::format("an integer from {} to {}", least, most));
  }
  return value->get<int64_t>();
}

int64_t KeyReader::integer(std::string_view key, int64_t most) {
  const auto value = find_integer(key, 1, most);
  return value ? *value : (fail(key, fmt::format("an integer from 1 to {}", most)), 0);
}

std::optional<double> KeyReader::find_number(std::string_view key) {
  const Json* const value = find(key);
  if (value && (!value->is_number() || !(value->get<double>() > 0))) {
    fail(key, "a number above 0");
  }
  return value ? std::optional(value->get<double>()) : std::nullopt;
}

double KeyReader::number(std::string_view key) {
  const auto value = find_number(key);
  return value ? *value : (fail(key, "a number above 0"), 0);
}

bool KeyReader::boolean(std::string_view key, bool otherwise) {
  const Json* const value = find(key);
  if (value && !value->is_boolean()) {
    fail(key, "true or false");
  }
  return value ? value->get<bool>() : otherwise;
}

void KeyReader::check_all_read(const std::string& remedy) const {
  std::vector<std::string> left;
  for (const auto& [key, value] : object_.items()) {
    if (!read_.contains(key) && !value.is_null()) {
      left.push_back(fmt::format("{} ({})", key, shown(value)));
    }
  }
  TESSERA_CHECK(ValueError, left.empty(), "{}unknown keys, which may change what the model computes: {}. {}", place_,
                fmt::join(left, ", "), remedy);
}

}  // namespace tessera::models
