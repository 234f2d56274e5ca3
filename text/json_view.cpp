#include "text/json_view.h"

#include <fstream>
#include <iterator>
#include <limits>

#include "text/unicode.h"

namespace tessera::text {

namespace {

constexpr size_t kMaxShown = 80;
constexpr int kMaxNesting = 16;

void append_steps(std::vector<JsonView>& steps, const JsonView& component, const char* key, int nesting) {
  if (component.is_null()) {
    return;
  }
  TESSERA_CHECK(ValueError, nesting <= kMaxNesting, "{}: a Sequence nested more than {} deep", component.path(),
                kMaxNesting);
  if (component.at("type").as_string() != "Sequence") {
    steps.push_back(component);
    return;
  }
  for (const auto& step : component.at(key).elements()) {
    append_steps(steps, step, key, nesting + 1);
  }
}

}  // namespace

std::vector<JsonView> steps_of(const JsonView& component, const char* key) {
  std::vector<JsonView> steps;
  append_steps(steps, component, key, 0);
  return steps;
}

void refuse_type(const JsonView& component, const char* allowed) {
  const auto type = component.at("type");
  throw NotImplementedError(
      fmt::format("{}: {} is not supported; supported are {}", type.path(), shown(type.value()), allowed));
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TESSERA_CHECK(ValueError, file, "{}: cannot be read", path);
  std::string content((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  TESSERA_CHECK(ValueError, !file.bad(), "{}: reading failed", path);
  return content;
}

nlohmann::json parse_json(std::string_view content, const std::string& name) {
  try {
    return nlohmann::json::parse(content.begin(), content.end());
  } catch (const nlohmann::json::exception& error) {
    throw ValueError(fmt::format("{}: no valid JSON ({})", name, error.what()));
  }
}

std::string shown(const nlohmann::json& value) {
  if (value.is_structured()) {
    return fmt::format("an {} of {}", value.type_name(), value.size());
  }
  // Replaces errors, because truncating a valid text may split a character.
  auto text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMaxShown) {
    text.resize(kMaxShown);
    text += "...";
  }
  return text;
}

const nlohmann::json& JsonView::expect(bool is_right, const char* what) const {
  TESSERA_CHECK(ValueError, is_right, "{}: is {}, must be {}", path_, shown(*value_), what);
  return *value_;
}

bool JsonView::has(const char* key) const {
  const auto& members = as_object();
  const auto found = members.find(key);
  return found != members.end() && !found->second.is_null();
}

JsonView JsonView::at(const char* key) const {
  const auto& members = as_object();
  const auto found = members.find(key);
  TESSERA_CHECK(ValueError, found != members.end(), "{}: has no \"{}\", which it must have", path_, key);
  return {found->second, fmt::format("{}.{}", path_, key)};
}

std::vector<JsonView> JsonView::elements() const {
  std::vector<JsonView> views;
  for (const auto& element : as_array()) {
    views.emplace_back(element, fmt::format("{}[{}]", path_, views.size()));
  }
  return views;
}

const nlohmann::json::object_t& JsonView::as_object() const {
  return expect(value_->is_object(), "an object").get_ref<const Json::object_t&>();
}

const nlohmann::json::array_t& JsonView::as_array() const {
  return expect(value_->is_array(), "an array").get_ref<const Json::array_t&>();
}

const std::string& JsonView::as_string() const {
  return expect(value_->is_string(), "a string").get_ref<const std::string&>();
}

bool JsonView::as_bool() const {
  return expect(value_->is_boolean(), "true or false").get<bool>();
}

int32_t JsonView::as_id() const {
  constexpr uint64_t kMaxId = std::numeric_limits<int32_t>::max();
  const bool is_id = value_->is_number_unsigned() && value_->get<uint64_t>() <= kMaxId;
  return expect(is_id, "an integer from 0 to 2147483647").get<int32_t>();
}

char32_t JsonView::as_character() const {
  const auto& text = as_string();
  expect(!text.empty() && utf8_length(text[0]) == text.size(), "a string of one character");
  return decode_utf8(text.data());
}

}  // namespace tessera::text
