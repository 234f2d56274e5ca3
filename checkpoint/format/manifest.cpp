#include "checkpoint/format/manifest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <charconv>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/json_text.h"

namespace tessera::dcp {

namespace {

using nlohmann::json;

// Deeper than any file of ours, and safe for recursion over the parsed text.
constexpr int kMaxDepth = 12;

// Text before the manifest's content, which is its last member.
constexpr std::string_view kContent = R"("content":)";

std::string hex(uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

json parse(std::string_view text, const std::string& file) {
  check_json_depth(text, file, kMaxDepth);
  try {
    return json::parse(text.begin(), text.end());
  } catch (const json::exception& error) {
    throw CheckpointError(fmt::format("{}: damaged, or not what its name says ({})", file, error.what()));
  }
}

/// Runs `read` on parsed JSON. If the JSON has an unexpected form, the error names the file.
template <class Read>
auto read_json(const std::string& file, Read read) {
  try {
    return read();
  } catch (const json::exception& error) {
    throw CheckpointError(fmt::format("{}: not of the form that its name says ({})", file, error.what()));
  }
}

/// Shortens a value, which may be as long as the file, for messages.
std::string shortened(std::string text) {
  constexpr size_t kMaxShown = 80;
  if (text.size() > kMaxShown) {
    text.resize(kMaxShown);
    text += "...";
  }
  return text;
}

uint64_t parse_hash(const json& value, const std::string& file) {
  const auto& text = value.get_ref<const std::string&>();
  TESSERA_CHECK(CheckpointError, text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string::npos,
                "{}: '{}' is no checksum", file, shortened(text));
  return std::strtoull(text.c_str(), nullptr, 16);
}

void check_file_name(const std::string& name, const std::string& file) {
  const bool is_plain = !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
                        name.find('\\') == std::string::npos && name.find('\0') == std::string::npos;
  TESSERA_CHECK(CheckpointError, is_plain,
                "{}: names the file '{}'; only names of files in the same folder are allowed", file, name);
}

/// Parses an integer from 0 to INT64_MAX; `what` describes it in errors.
int64_t parse_count(const json& value, const char* what, const std::string& file) {
  // nlohmann::json would silently convert a floating-point or negative number.
  TESSERA_CHECK(CheckpointError, value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX, "{}: {} is no {}",
                file, shortened(value.dump()), what);
  return value.get<int64_t>();
}

Sizes parse_sizes(const json& value, const std::string& file) {
  Sizes sizes;
  for (const auto& size : value.get_ref<const json::array_t&>()) {
    TESSERA_CHECK(CheckpointError, sizes.size() < kMaxDims, "{}: a block has more than {} dims", file, kMaxDims);
    sizes.push_back(parse_count(size, "size of a block", file));
  }
  return sizes;
}

/// Parses a block. Does not check that it is within its tensor, whose sizes are not known here.
CheckedBlock parse_block(const json& content, const std::string& key, const std::string& file) {
  CheckedBlock block{.slice = {.offsets = parse_sizes(content.at(0), file), .sizes = parse_sizes(content.at(1), file)},
                     .hash = parse_hash(content.at(2), file)};
  const auto& [offsets, sizes] = block.slice;
  TESSERA_CHECK(CheckpointError, offsets.size() == sizes.size(),
                "{}: a block of tensor '{}' has {} offsets and {} sizes; each dim has one of both", file, key,
                offsets.size(), sizes.size());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    TESSERA_CHECK(CheckpointError, offsets[dim] <= INT64_MAX - sizes[dim],
                  "{}: a block of tensor '{}' has offset {} and size {} in dim {}, more than any tensor has", file, key,
                  offsets[dim], sizes[dim], dim);
  }
  return block;
}

/// Parses exactly the output of {:a}, such as "-0x1.8p-1", "inf", "-nan". strtod depends on the program's locale: if
/// the decimal point is a comma, it would read 1 here.
std::optional<double> parse_double(std::string_view text) {
  const bool is_negative = text.starts_with('-');
  text.remove_prefix(is_negative ? 1 : 0);
  const bool is_finite = text.starts_with("0x");
  text.remove_prefix(is_finite ? 2 : 0);
  // from_chars accepts a second sign, and "nan" after "0x".
  const bool has_form = is_finite ? text.find_first_of("0123456789abcdef") == 0 : text == "inf" || text == "nan";
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::hex);
  if (!has_form || error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return is_negative ? -value : value;
}

Values values_of_section(const json& content, const std::string& file) {
  Values values;
  for (const auto& [key, typed] : content.get_ref<const json::object_t&>()) {
    TESSERA_CHECK(CheckpointError, typed.is_object() && typed.size() == 1, "{}: value '{}' has no type", file, key);
    const auto& [type, value] = *typed.get_ref<const json::object_t&>().begin();
    if (type == "int") {
      const bool fits =
          value.is_number_integer() && (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t{INT64_MAX});
      TESSERA_CHECK(CheckpointError, fits, "{}: value '{}' is no integer of 64 bits: {}", file, key,
                    shortened(value.dump()));
      values.emplace_hint(values.end(), key, value.get<int64_t>());
    } else if (type == "double") {
      const auto number = parse_double(value.get_ref<const std::string&>());
      TESSERA_CHECK(CheckpointError, number, "{}: value '{}' is {}; a double is written as \"0x1.8p-1\"", file, key,
                    shortened(value.dump()));
      values.emplace_hint(values.end(), key, *number);
    } else {
      TESSERA_CHECK(CheckpointError, type == "string", "{}: value '{}' has the unknown type '{}'", file, key, type);
      values.emplace_hint(values.end(), key, value.get<std::string>());
    }
  }
  return values;
}

Section parse_section(const std::string& name, const std::string& file) {
  for (const Section section : kSections) {
    if (section_name(section) == name) {
      return section;
    }
  }
  throw CheckpointError(fmt::format("{}: the unknown section '{}'", file, name));
}

ManifestFile parse_file(const json& content, const std::string& file) {
  ManifestFile result{.section = parse_section(content.at("section").get_ref<const std::string&>(), file),
                      .bytes = static_cast<uint64_t>(parse_count(content.at("bytes"), "size of a file", file)),
                      .header_hash = parse_hash(content.at("header"), file),
                      .tensors = {}};
  for (const auto& [key, blocks] : content.at("tensors").get_ref<const json::object_t&>()) {
    auto& target = result.tensors.try_emplace(result.tensors.end(), key)->second;  // sorted, as JSON's objects are
    for (const auto& block : blocks.get_ref<const json::array_t&>()) {
      target.push_back(parse_block(block, key, file));
    }
  }
  return result;
}

std::map<Section, Values> values_of_sections(const json& content, const std::string& file) {
  std::map<Section, Values> result;
  for (const auto& [section, values] : content.get_ref<const json::object_t&>()) {
    result[parse_section(section, file)] = values_of_section(values, file);
  }
  return result;
}

/// Appends `{"int":1}`.
void append_value(std::string& out, const Value& value) {
  if (const auto* number = std::get_if<int64_t>(&value)) {
    fmt::format_to(std::back_inserter(out), R"({{"int":{}}})", *number);
  } else if (const auto* real = std::get_if<double>(&value)) {
    fmt::format_to(std::back_inserter(out), R"({{"double":"{:a}"}})", *real);
  } else {
    out += R"({"string":)";
    append_json(out, std::get<std::string>(value));
    out += '}';
  }
}

void append_blocks(std::string& out, const std::vector<CheckedBlock>& blocks) {
  append_json_list(out, '[', blocks, ']', [&](const CheckedBlock& block) {
    out += '[';
    append_json(out, block.slice.offsets);
    out += ',';
    append_json(out, block.slice.sizes);
    fmt::format_to(std::back_inserter(out), R"(,"{}"])", hex(block.hash));
  });
}

void append_file(std::string& out, const ManifestFile& file) {
  fmt::format_to(std::back_inserter(out), R"({{"bytes":{},"header":"{}","section":"{}","tensors":)", file.bytes,
                 hex(file.header_hash), section_name(file.section));
  append_json_list(out, '{', file.tensors, '}', [&](const auto& tensor) {
    append_json_key(out, tensor.first);
    append_blocks(out, tensor.second);
  });
  out += '}';
}

/// Returns whether `sum` matches the content: its text as it is or, if a tool has reformatted the file, the text that
/// format_manifest() would have written.
bool has_checksum(std::string_view text, const json& content, uint64_t sum) {
  const size_t begin = text.find(kContent) + kContent.size(), end = text.rfind('}');
  if (begin < end && hash_bytes(text.data() + begin, end - begin) == sum) {
    return true;
  }
  const auto own_text = content.dump();
  return hash_bytes(own_text.data(), own_text.size()) == sum;
}

}  // namespace

uint64_t hash_bytes(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

std::string format_values(const std::map<Section, Values>& values) {
  std::string text;
  std::vector<std::pair<Section, const Values*>> there;
  for (const auto& [section, of_section] : values) {
    if (!of_section.empty()) {
      there.emplace_back(section, &of_section);
    }
  }
  append_json_list(text, '{', there, '}', [&](const auto& section) {
    append_json_key(text, section_name(section.first));
    append_json_list(text, '{', *section.second, '}', [&](const auto& value) {
      append_json_key(text, value.first);
      append_value(text, value.second);
    });
  });
  return text;
}

std::map<Section, Values> parse_values(std::string_view text, const std::string& file) {
  return read_json(file, [&] { return values_of_sections(parse(text, file), file); });
}

// Keys of objects are sorted, so that nlohmann::json reproduces the text that it has read.
std::string format_manifest(const Manifest& manifest) {
  std::string content = R"({"files":)";
  append_json_list(content, '{', manifest.files, '}', [&](const auto& file) {
    append_json_key(content, file.first);
    append_file(content, file.second);
  });
  content += R"(,"values":)" + format_values(manifest.values) + "}";
  return fmt::format("{{\"tessera_checkpoint\":{},\"checksum\":\"{}\",{}{}}}\n", kManifestVersion,
                     hex(hash_bytes(content.data(), content.size())), kContent, content);
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  return read_json(file, [&] {
    const json whole = parse(text, file);
    const auto version = parse_count(whole.at("tessera_checkpoint"), "version of the format", file);
    TESSERA_CHECK(CheckpointError, version >= 1 && version <= kManifestVersion,
                  "{}: version {} of the format; this library reads up to {}", file, version, kManifestVersion);
    const json& content = whole.at("content");
    TESSERA_CHECK(CheckpointError, has_checksum(text, content, parse_hash(whole.at("checksum"), file)),
                  "{}: damaged, its checksum does not hold", file);
    Manifest manifest;
    for (const auto& [name, entry] : content.at("files").get_ref<const json::object_t&>()) {
      check_file_name(name, file);
      manifest.files[name] = parse_file(entry, file);
    }
    manifest.values = values_of_sections(content.at("values"), file);
    return manifest;
  });
}

std::string format_index(const std::map<std::string, std::string>& weight_map, uint64_t total_bytes) {
  std::string text =
      fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": ", total_bytes);
  append_json_list(text, '{', weight_map, '\n', [&](const auto& item) {
    text += "\n    ";
    append_json(text, item.first);
    text += ": ";
    append_json(text, item.second);
  });
  return text + "  }\n}\n";
}

std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file) {
  return read_json(file, [&] {
    const json index = parse(text, file);
    auto weight_map = index.at("weight_map").get<std::map<std::string, std::string>>();
    for (const auto& [key, name] : weight_map) {
      check_file_name(name, file);
    }
    return weight_map;
  });
}

std::map<std::string, Sizes> parse_sharding_info(std::string_view text, const std::string& file) {
  return read_json(file, [&] {
    std::map<std::string, Sizes> result;
    const json info = parse(text, file);
    for (const auto& [key, part] : info.get_ref<const json::object_t&>()) {
      result[key] = parse_sizes(part.at("saved_offsets"), file);
    }
    return result;
  });
}

}  // namespace tessera::dcp
