#pragma once
// Reads the keys of a JSON object. Errors name the key, its value and what is allowed. Internal to this package. Thread
// safety: one thread per reader.
//
//   KeyReader reader(json, "config.json: ");
//   const int64_t size = reader.integer("hidden_size");     // "config.json: hidden_size is -4; it must be ..."
//   reader.check_all_read("Remove them");                   // unread keys may affect the model

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"

namespace tessera::models {

using Json = nlohmann::json;

constexpr int64_t kMaxSize = int64_t{1} << 31;  // of a dim, so that the product of two fits 64 bits

/// Values by name. If a value has several names, the first one is written.
template <class T>
using Names = std::vector<std::pair<std::string_view, T>>;

template <class T>
std::string_view name_of(const Names<T>& names, T value) {
  return std::ranges::find(names, value, &std::pair<std::string_view, T>::second)->first;
}

/// Reads a file of at most 16 MiB. Throws CheckpointError.
std::string read_config_text(const std::string& file);

/// Parses a JSON object of at most 32 levels. Throws ValueError, or CheckpointError for more levels.
Json parse_config_object(std::string_view text, const std::string& file);

/// Returns a value, which may be as long as the file, shortened for messages.
std::string shown(const Json& value);

/// Returns the value as JSON, or null if there is none.
Json nullable(const auto& value) {
  return value ? Json(*value) : Json();
}

/// Throws ValueError, naming the field of a DecoderConfig, unless 1 <= size <= most.
void check_size(const char* name, int64_t size, int64_t most = kMaxSize);

/// Reads keys of an object and tracks which have been read. Functions throw ValueError; null counts as missing.
class KeyReader {
 public:
  /// `place` is the object's position for messages: "config.json: ", "config.json: rope_scaling.". The object must
  /// outlive this reader.
  KeyReader(const Json& object, std::string place) : object_(object), place_(std::move(place)) {}

  /// Throws an error that says that the key must be `allowed`.
  [[noreturn]] void fail(std::string_view key, const std::string& allowed) const;

  bool has(std::string_view key) const { return object_.contains(key); }  // true for null
  const Json* find(std::string_view key);                                 // null if missing

  /// Return the key's value, or for the find functions nothing if the key is missing.
  std::optional<int64_t> find_integer(std::string_view key, int64_t least = 1, int64_t most = kMaxSize);
  int64_t integer(std::string_view key, int64_t most = kMaxSize);
  std::optional<double> find_number(std::string_view key);
  double number(std::string_view key);
  bool boolean(std::string_view key, bool otherwise);

  /// Returns the result that `value`, found under `key`, is the name of.
  template <class T>
  T named(std::string_view key, const Json& value, const Names<T>& names) const;
  template <class T>
  T named(std::string_view key, const Names<T>& names, std::optional<T> otherwise);

  /// Throws if there are unread keys other than null.
  void check_all_read(const std::string& remedy) const;

  const Json& object() const { return object_; }
  const std::string& place() const { return place_; }

 private:
  const Json& object_;
  std::string place_;
  std::set<std::string, std::less<>> read_;
};

template <class T>
T KeyReader::named(std::string_view key, const Json& value, const Names<T>& names) const {
  if (value.is_string()) {
    for (const auto& [name, result] : names) {
      if (name == value.get_ref<const std::string&>()) {
        return result;
      }
    }
  }
  std::vector<std::string_view> allowed;
  std::ranges::transform(names, std::back_inserter(allowed), &std::pair<std::string_view, T>::first);
  throw ValueError(
      fmt::format("{}{} has {}; allowed are \"{}\"", place_, key, shown(value), fmt::join(allowed, "\", \"")));
}

template <class T>
T KeyReader::named(std::string_view key, const Names<T>& names, std::optional<T> otherwise) {
  const Json* const value = find(key);
  if (!value && otherwise) {
    return *otherwise;
  }
  return named(key, value ? *value : Json(), names);
}

}  // namespace tessera::models
