#include "checkpoint/format/header_reader.h"

#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/format/checkpoint_error.h"

namespace tessera::dcp {

namespace {

using nlohmann::json;

// Limit for ignored values; the parser uses one bit per level.
constexpr int kMaxUnknownDepth = 100;

/// Handles the parser's events. Each handler returns true, or throws for content that does not belong in a header. Like
/// the reference implementation, it accepts null metadata, and additional fields of a tensor, which are ignored.
class HeaderReader : public json::json_sax_t {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() override { return is_null_metadata() || skip_or_fail("null"); }
  bool boolean(bool) override { return skip_or_fail("true or false"); }
  bool number_integer(number_integer_t) override { return skip_or_fail("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return skip_or_fail("a number that is no integer"); }
  bool binary(binary_t&) override { fail("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::Shape) {
      TESSERA_CHECK(CheckpointError, value <= INT64_MAX, "{}: tensor '{}' has a dim of {}", file_, key_, value);
      TESSERA_CHECK(CheckpointError, entry().sizes.size() < kMaxDims, "{}: tensor '{}' has more than {} dims", file_,
                    key_, kMaxDims);
      entry().sizes.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::Offsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry().begin : entry().end) = value;
    } else {
      skip_or_fail("a number");
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::Metadata) {
      header_.metadata[field_] = value;
    } else if (place_ == Place::Tensor && field_ == "dtype") {
      const auto dtype = parse_safetensors_dtype(value);
      entry().dtype = dtype.value_or(c10::ScalarType::Byte);
      entry().unknown_dtype = dtype ? std::string() : value;
    } else {
      skip_or_fail("a string");
    }
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::Outside) {
      place_ = Place::Top;
    } else if (place_ == Place::Top) {
      place_ = key_ == "__metadata__" ? Place::Metadata : Place::Tensor;
      if (place_ == Place::Tensor) {
        header_.entries.push_back({.key = key_});
      }
      fields_.clear();
    } else {
      skip_or_fail("an object");
      enter();
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::Top) {
      TESSERA_CHECK(CheckpointError, keys_.insert(name).second, "{}: key '{}' is there twice", file_, name);
      key_ = name;
    } else if (place_ == Place::Metadata || (place_ == Place::Tensor && kFields.contains(name))) {
      TESSERA_CHECK(CheckpointError, fields_.insert(name).second, "{}: tensor '{}' has '{}' twice", file_, key_, name);
      field_ = name;
    } else if (place_ == Place::Tensor) {
      field_ = name;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::Unknown) {
      return leave();
    }
    if (place_ == Place::Tensor) {
      TESSERA_CHECK(CheckpointError, fields_ == kFields, "{}: tensor '{}' lacks dtype, shape or data_offsets", file_,
                    key_);
    }
    place_ = place_ == Place::Top ? Place::Outside : Place::Top;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::Tensor && field_ == "shape") {
      place_ = Place::Shape;
    } else if (place_ == Place::Tensor && field_ == "data_offsets") {
      place_ = Place::Offsets;
      offsets_ = 0;
    } else {
      skip_or_fail("an array");
      enter();
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::Unknown) {
      return leave();
    }
    TESSERA_CHECK(CheckpointError, place_ != Place::Offsets || offsets_ == 2,
                  "{}: tensor '{}' has {} data_offsets, not 2", file_, key_, offsets_);
    place_ = Place::Tensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    throw CheckpointError(fmt::format(
        "{}: the header is no JSON from byte {} on; the file is damaged, or no safetensors file", file_, position));
  }

 private:
  enum class Place { Outside, Top, Metadata, Tensor, Shape, Offsets, Unknown };
  inline static const std::set<std::string> kFields = {"data_offsets", "dtype", "shape"};

  SafetensorsEntry& entry() { return header_.entries.back(); }

  bool is_null_metadata() const { return place_ == Place::Top && key_ == "__metadata__"; }

  /// Returns if the value belongs to an unknown field of a tensor, which readers ignore; otherwise throws.
  bool skip_or_fail(const char* what) {
    if (place_ != Place::Unknown && (place_ != Place::Tensor || kFields.contains(field_))) {
      fail(what);
    }
    return true;
  }

  /// Enters or leaves an object or array in an unknown field.
  void enter() {
    place_ = Place::Unknown;
    TESSERA_CHECK(CheckpointError, ++unknown_depth_ <= kMaxUnknownDepth,
                  "{}: tensor '{}': field '{}' is nested more than {} deep", file_, key_, field_, kMaxUnknownDepth);
  }
  bool leave() {
    if (--unknown_depth_ == 0) {
      place_ = Place::Tensor;
    }
    return true;
  }

  [[noreturn]] void fail(const char* what) {
    throw CheckpointError(place_ == Place::Outside
                              ? fmt::format("{}: the header is {}, not an object", file_, what)
                              : fmt::format("{}: {} where a header has none, at '{}'", file_, what, key_));
  }

  const std::string& file_;
  SafetensorsHeader header_;
  Place place_ = Place::Outside;
  std::string key_, field_;
  std::set<std::string> keys_, fields_;
  int offsets_ = 0;
  int unknown_depth_ = 0;
};

}  // namespace

SafetensorsHeader read_header_json(std::string_view text, const std::string& file) {
  HeaderReader reader(file);
  json::sax_parse(text.begin(), text.end(), &reader);
  return reader.take();
}

}  // namespace tessera::dcp
