#pragma once
// Views JSON values along with their path, which errors report.

#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace tessera::text {

/// Value in a JSON document, which must outlive the view. Accessors throw ValueError for a value of another type.
class JsonView {
 public:
  using Json = nlohmann::json;

  /// Makes a view of the root; `path` is the document's name.
  JsonView(const Json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  const Json& value() const { return *value_; }
  bool is_null() const { return value_->is_null(); }

  /// Returns whether an object has `key` with a value other than null.
  bool has(const char* key) const;
  /// Returns an object's member. Throws ValueError if it is missing.
  JsonView at(const char* key) const;
  /// Returns the elements of an array.
  std::vector<JsonView> elements() const;

  const Json::object_t& as_object() const;
  const Json::array_t& as_array() const;
  const std::string& as_string() const;
  bool as_bool() const;
  /// Returns an integer from 0 to INT32_MAX.
  int32_t as_id() const;
  /// Returns a string of one character.
  char32_t as_character() const;

  bool bool_or(const char* key, bool otherwise) const { return has(key) ? at(key).as_bool() : otherwise; }

 private:
  const Json& expect(bool is_right, const char* what) const;

  const Json* value_;
  std::string path_;
};

/// Returns the steps of a component: none for null, the nested steps under `key` for a "Sequence", otherwise itself.
std::vector<JsonView> steps_of(const JsonView& component, const char* key);

/// Throws NotImplementedError for a component's "type".
[[noreturn]] void refuse_type(const JsonView& component, const char* allowed);

/// Returns a file's contents. Throws ValueError if it cannot be read.
std::string read_file(const std::string& path);

/// Parses a document. Throws ValueError, with its name and position, if it is not valid JSON.
nlohmann::json parse_json(std::string_view content, const std::string& name);

/// Returns the beginning of a value's text, for messages.
std::string shown(const nlohmann::json& value);

}  // namespace tessera::text
