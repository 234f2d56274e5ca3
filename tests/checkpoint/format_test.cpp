// Headers, manifests and plans: text and integers. What is malformed must be a CheckpointError and nothing else.

#include <algorithm>
#include <array>
#include <clocale>
#include <cmath>
#include <limits>
#include <random>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/plan/save_plan.h"
#include "testing/expect.h"
#include "third_party/catch2/catch.h"

namespace tessera::dcp {
using c10::ScalarType;

namespace {

constexpr const char* kHeader =
    R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("empty":{"dtype":"I64","shape":[0,4],"data_offsets":[24,24]},"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}})";
constexpr uint64_t kDataBytes = 26;

SafetensorsHeader example_header() {
  return {.entries = {{.key = "w", .dtype = ScalarType::Float, .sizes = {2, 3}, .begin = 0, .end = 24},
                      {.key = "empty", .dtype = ScalarType::Long, .sizes = {0, 4}, .begin = 24, .end = 24},
                      {.key = "b", .dtype = ScalarType::BFloat16, .sizes = {}, .begin = 24, .end = 26}},
          .metadata = {{"format", "pt"}}};
}

Manifest example_manifest() {
  return {.files = {{"model-00001-of-00001.safetensors",
                     {.section = Section::Model,
                      .bytes = 4096,
                      .header_hash = 0xfedcba9876543210,
                      .tensors = {{"w",
                                   {{.slice = {.offsets = {0, 0}, .sizes = {1, 3}}, .hash = 1},
                                    {.slice = {.offsets = {1, 0}, .sizes = {1, 3}}, .hash = ~uint64_t{0}}}}}}}},
          .values = {{Section::User, {{"step", int64_t{-3}}, {"lr", 0.1}, {"name", std::string("a\n\"b\" ü")}}},
                     {Section::Optimizer, {{"inf", -std::numeric_limits<double>::infinity()}}}}};
}

/// A few bytes of `text` changed, removed, doubled or cut off.
std::string mutated(std::string text, std::mt19937_64& random) {
  static const std::string characters = "{}[],:\"0123456789-+.eE \\utfnals\x00\xff\x80";
  const auto pick = [&](size_t count) { return static_cast<size_t>(random() % count); };
  for (size_t i = 1 + pick(3); i > 0 && !text.empty(); --i) {
    const size_t place = pick(text.size());
    const size_t length = std::min(1 + pick(8), text.size() - place);
    switch (pick(5)) {
      case 0:
        text[place] = characters[pick(characters.size())];
        break;
      case 1:
        text.erase(place, length);
        break;
      case 2:
        text.insert(place, text.substr(pick(text.size()), 1 + pick(40)));
        break;
      case 3:
        text[place] = static_cast<char>(text[place] ^ (1 << pick(8)));
        break;
      default:
        text.resize(place);
    }
  }
  return text;
}
/// Parses `count` mutations of `text`; returns how many were refused. Anything but a CheckpointError gets out.
template <class Parse>
int count_refused(const std::string& text, int count, uint64_t seed, Parse parse) {
  std::mt19937_64 random(seed);
  int refused = 0;
  for (int i = 0; i < count; ++i) {
    const auto input = mutated(text, random);
    try {
      parse(input);
    } catch (const CheckpointError&) {
      ++refused;
    } catch (...) {
      UNSCOPED_INFO("seed " << seed << ", input " << i << ": " << input);
      throw;
    }
  }
  return refused;
}

}  // namespace

TEST_CASE("a header of any writer is read, and ours is read back") {
  CHECK(parse_safetensors_header(kHeader, kDataBytes, "f") == example_header());
  const auto bytes = format_safetensors_header(example_header());
  CHECK(bytes.size() % 64 == 0);
  CHECK(parse_header_length(bytes, bytes.size() + kDataBytes, "f") == bytes.size() - 8);
  CHECK(parse_safetensors_header(std::string_view(bytes).substr(8), kDataBytes, "f") == example_header());
}

TEST_CASE("a dtype that we do not know is no fault of the header") {
  const auto header =
      parse_safetensors_header(R"({"w":{"dtype":"F4","shape":[4,2],"data_offsets":[0,4]}})", /*data_bytes=*/4, "f");
  CHECK(header.entries ==
        std::vector<SafetensorsEntry>{
            {.key = "w", .dtype = ScalarType::Byte, .sizes = {4, 2}, .begin = 0, .end = 4, .unknown_dtype = "F4"}});
}

TEST_CASE("what the reference implementation accepts beside the format's fields is accepted, and ignored") {
  const auto expect_w = [](const std::string& text) {
    CAPTURE(text);
    const auto header = parse_safetensors_header(text, /*data_bytes=*/4, "f");
    CHECK(header.metadata.empty());
    REQUIRE(header.entries.size() == 1);
    CHECK(header.entries[0].sizes == Sizes{4});
    CHECK(header.entries[0].end == 4);
  };
  const std::string fields = R"("dtype":"U8","shape":[4],"data_offsets":[0,4])";
  expect_w(R"({"__metadata__":null,"":{)" + fields + "}}");
  for (const std::string value :
       {"null", "true", "-1", "0.5", "7", R"("x")", "[]", "{}", R"([{"shape":[9],"dtype":["F32"]},[[1,-2],null]])",
        R"({"data_offsets":[8,9],"shape":{"a":{},"a":[]}})"}) {
    expect_w(R"({"w":{"more":)" + value + "," + fields + "}}");
    expect_w(R"({"w":{)" + fields + R"(,"more":)" + value + R"(,"more":0}})");
    CHECK_THROWS_AS(parse_safetensors_header(R"({"w":{"shape":)" + value + "," + fields + "}}", 4, "f"),
                    CheckpointError);
  }
  CHECK_THROWS_WITH(parse_safetensors_header(R"({"w":{"more":)" + std::string(1'000'000, '['), 4, "f"),
                    "f: tensor 'w': field 'more' is nested more than 100 deep");
  CHECK_THROWS_WITH(parse_safetensors_header(R"({"w":null})", 0, "f"), "f: null where a header has none, at 'w'");
}

TEST_CASE("malformed headers are refused with the file, the key and what is wrong") {
  const auto message = [](const std::string& text, uint64_t data_bytes) -> std::string {
    try {
      parse_safetensors_header(text, data_bytes, "a.safetensors");
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "";
  };
  const auto tensor = [](const std::string& fields) { return R"({"w":{)" + fields + "}}"; };
  CHECK(message("", 0) ==
        "a.safetensors: the header is no JSON from byte 1 on; the file is damaged, or no safetensors file");
  CHECK(message("[]", 0) == "a.safetensors: the header is an array, not an object");
  CHECK(message("7", 0) == "a.safetensors: the header is a number, not an object");
  CHECK(message(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), 8) ==
        "a.safetensors: tensor 'w' has 8 bytes of data (data_offsets [0, 8]), but its shape and dtype make 4");
  CHECK(message(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 3) ==
        "a.safetensors: tensor 'w' ends at byte 4 of the data, but the file has 3; it is truncated");
  CHECK(message(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), 9) ==
        "a.safetensors: 9 bytes of data, of which its tensors are 4");
  CHECK(message(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), 8) ==
        "a.safetensors: tensor 'w' begins at byte 4 of the data, where 0 are used");
  CHECK(message(tensor(R"("dtype":"F4","shape":[9,8],"data_offsets":[0,8])"), 8) ==
        "a.safetensors: tensor 'w' has 8 bytes of data (data_offsets [0, 8]), but its shape and dtype make 72");
  CHECK(message(tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4) ==
        "a.safetensors: a negative number where a header has none, at 'w'");
  CHECK(
      message(tensor(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4])"), 4) ==
      "a.safetensors: tensor 'w' has 4 bytes of data (data_offsets [0, 4]), but its shape and dtype make more than any "
      "file has");
  CHECK(message(tensor(R"("dtype":"F32","shape":[1])"), 4) ==
        "a.safetensors: tensor 'w' lacks dtype, shape or data_offsets");
  CHECK(message(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), 4) ==
        "a.safetensors: tensor 'w' has 1 data_offsets, not 2");
  CHECK(message(tensor(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), 4) ==
        "a.safetensors: an array where a header has none, at 'w'");
  CHECK(
      message(
          R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
          0) == "a.safetensors: key 'w' is there twice");
  const std::string deep(1'000'000, '[');
  CHECK(message(tensor(R"("shape":)" + deep), 0) == "a.safetensors: an array where a header has none, at 'w'");
  std::string many_dims = "1";
  for (int i = 0; i < 64; ++i) {
    many_dims += ",1";
  }
  CHECK(message(tensor(R"("dtype":"U8","data_offsets":[0,1],"shape":[)" + many_dims + "]"), 1) ==
        "a.safetensors: tensor 'w' has more than 64 dims");
  CHECK_THROWS_WITH(parse_header_length("short", 5, "f"), "f: 5 bytes are no safetensors file; is it truncated?");
  CHECK_THROWS_WITH(parse_header_length(std::string(8, '\xff'), 100, "f"),
                    Catch::Contains("a header of 18446744073709551615 bytes, of at most 100000000"));
  CHECK_THROWS_WITH(parse_header_length(std::string("\x10\0\0\0\0\0\0\0", 8), 20, "f"),
                    "f: a header of 16 bytes in a file of 20; the file is truncated");
}

TEST_CASE("mutated headers are read or refused, and nothing else happens") {
  const int refused = count_refused(kHeader, 20000, 1, [](const std::string& text) {
    const auto header = parse_safetensors_header(text, kDataBytes, "f");
    uint64_t end = 0;
    for (const auto& entry : header.entries) {
      REQUIRE(entry.begin == end);
      end = entry.end;
    }
    REQUIRE(end == kDataBytes);
  });
  CHECK(refused > 10000);
  CHECK(refused < 20000);
}

TEST_CASE("a manifest is read back to the bit") {
  const auto manifest = example_manifest();
  CHECK(parse_manifest(format_manifest(manifest), "tessera.json") == manifest);
  const auto nan = parse_values(format_values({{Section::User, {{"x", std::nan("")}}}}), "f");
  CHECK(std::isnan(std::get<double>(nan.at(Section::User).at("x"))));
}

TEST_CASE("a manifest that was laid out anew is read as before, and names of all kinds") {
  auto manifest = example_manifest();
  auto& tensors = manifest.files.begin()->second.tensors;
  for (const std::string name : {"", "a.b", "\"", "\\", "\n", "\x01", "\x7f", "ü", "日本"}) {
    tensors[name] = {};
    manifest.values[Section::User][name] = name;
  }
  auto text = format_manifest(manifest);
  CHECK(parse_manifest(text, "f") == manifest);
  CHECK(parse_index(format_index({{"\"\n", "ü"}, {"w", "file"}}, 7), "f").at("\"\n") == "ü");
  CHECK(parse_index(format_index({}, 0), "f").empty());
  const size_t content = text.find("\"content\":");
  text.insert(content + 10, "\n  ");
  CHECK(parse_manifest(text, "f") == manifest);
  text.insert(content, "\n");
  CHECK(parse_manifest(text, "f") == manifest);
  for (const std::string bytes : {"\xff", "a\xc3"}) {
    CHECK_THROWS_WITH(format_values({{Section::User, {{bytes, int64_t{1}}}}}), Catch::Contains("must be UTF-8"));
    CHECK_THROWS_WITH(format_values({{Section::User, {{"x", bytes}}}}), Catch::Contains("must be UTF-8"));
    CHECK_THROWS_WITH(format_safetensors_header({.entries = {{.key = bytes}}, .metadata = {}}),
                      Catch::Contains("must be UTF-8"));
  }
}

TEST_CASE("doubles are read back to the bit, whatever the program's locale is") {
  using Limits = std::numeric_limits<double>;
  const auto check = [] {
    for (const double value : {0.1, -0.1, 1e-3, 0.0, -0.0, 3.0, Limits::max(), Limits::min(), Limits::denorm_min(),
                               -Limits::denorm_min(), Limits::infinity(), -Limits::infinity()}) {
      const auto read = parse_values(format_values({{Section::User, {{"x", value}}}}), "f");
      const double back = std::get<double>(read.at(Section::User).at("x"));
      CHECK(back == value);
      CHECK(std::signbit(back) == std::signbit(value));
    }
  };
  check();
  for (const char* name : {"de_DE.UTF-8", "fr_FR.UTF-8", "de_DE", "fr_FR"}) {  // as far as the machine has them
    std::setlocale(LC_NUMERIC, name);
    check();
    std::setlocale(LC_NUMERIC, "C");
  }
}

TEST_CASE("a double must be all of its text") {
  const auto parse = [](const std::string& text) {
    return std::get<double>(
        parse_values(R"({"user":{"lr":{"double":")" + text + R"("}}})", "f").at(Section::User).at("lr"));
  };
  CHECK(parse("0x1.8p+1") == 3.0);
  CHECK(parse("-0x1.999999999999ap-4") == -0.1);
  CHECK(parse("0x0.0000000000001p-1022") == std::numeric_limits<double>::denorm_min());
  CHECK(parse("-inf") == -std::numeric_limits<double>::infinity());
  CHECK(std::isnan(parse("nan")));
  CHECK(std::signbit(parse("-nan")));
  // strtod reads all of the first where the locale has a comma, and the beginning of others.
  for (const std::string text :
       {"0x1,8p+1", "0x1.8p+1x", "0x1.8p+1 ", " 0x1.8p+1", "--0x1p+0", "-0x-1p+0", "0x0x1p+0", "0xinf", "0xp+0", "0x",
        "-", "", "0.1", "1", "infinity", "nan(1)", "NAN", "0x1p+1024", "lr"}) {
    CAPTURE(text);
    CHECK_THROWS_WITH(parse(text), "f: value 'lr' is \"" + text + "\"; a double is written as \"0x1.8p-1\"");
  }
}

TEST_CASE("what is nested too deep is refused before anything goes through it, also beside brackets in texts") {
  const auto nested = [](int depth, const std::string& middle) {
    return R"({"weight_map":{"a \"]]{[":"[[[[[[[[[[[[[["},"x":)" + std::string(static_cast<size_t>(depth), '[') +
           middle + std::string(static_cast<size_t>(depth), ']') + "}";
  };
  CHECK(parse_index(nested(11, ""), "f").at("a \"]]{[") == "[[[[[[[[[[[[[[");
  CHECK_THROWS_WITH(parse_index(nested(12, ""), "f"), "f: nested more than 12 deep");
  CHECK_THROWS_WITH(parse_index(nested(1'000'000, ""), "f"), "f: nested more than 12 deep");
}

TEST_CASE("a damaged manifest, and names that leave the folder, are refused") {
  const auto text = format_manifest(example_manifest());
  auto flipped = text;
  flipped[text.find("4096")] = '5';
  CHECK_THROWS_WITH(parse_manifest(flipped, "tessera.json"), "tessera.json: damaged, its checksum does not hold");
  CHECK_THROWS_WITH(parse_manifest(R"({"tessera_checkpoint": 2})", "f"),
                    "f: version 2 of the format; this library reads up to 1");
  CHECK_THROWS_AS(parse_manifest(std::string(100000, '['), "f"), CheckpointError);
  for (const std::string name : {"../x", "/etc/passwd", "a/b", "..", ".", ""}) {
    auto manifest = example_manifest();
    manifest.files[name] = {};
    CHECK_THROWS_WITH(parse_manifest(format_manifest(manifest), "f"),
                      "f: names the file '" + name + "'; only names of files in the same folder are allowed");
    CHECK_THROWS_AS(parse_index(format_index({{"w", name}}, 1), "f"), CheckpointError);
  }
  CHECK(parse_index(format_index({{"w", "model.safetensors"}}, 1), "f") ==
        std::map<std::string, std::string>{{"w", "model.safetensors"}});
}

namespace {

/// A manifest of this content, whose checksum holds.
std::string with_content(const std::string& canonical) {
  return fmt::format(R"({{"tessera_checkpoint":1,"checksum":"{:016x}","content":{}}})",
                     hash_bytes(canonical.data(), canonical.size()), canonical);
}

/// One whose tensor "w" has this block.
std::string with_block(const std::string& block) {
  return with_content(R"({"files":{"a.safetensors":{"bytes":9,"header":"0000000000000000","section":"model",)"
                      R"("tensors":{"w":[)" +
                      block + R"(]}}},"values":{}})");
}

}  // namespace

TEST_CASE("blocks and numbers that none can be are refused, though the checksum of the manifest holds") {
  const auto parse_block_of = [&](const std::string& offsets, const std::string& sizes) {
    return parse_manifest(with_block("[" + offsets + "," + sizes + R"(,"0000000000000000"])"), "f");
  };
  CHECK(parse_block_of("[0,9223372036854775806]", "[5,1]").files.size() == 1);
  for (const auto& [offsets, sizes, text] : std::vector<std::array<std::string, 3>>{
           {"[]", "[5,3]", "f: a block of tensor 'w' has 0 offsets and 2 sizes; each dim has one of both"},
           {"[0]", "[5,3]", "f: a block of tensor 'w' has 1 offsets and 2 sizes; each dim has one of both"},
           {"[0,0]", "[]", "f: a block of tensor 'w' has 2 offsets and 0 sizes; each dim has one of both"},
           {"[0,9223372036854775807]", "[5,1]",
            "f: a block of tensor 'w' has offset 9223372036854775807 and size 1 in dim 1, more than any tensor has"},
           {"[-1]", "[5]", "f: -1 is no size of a block"},
           {"[0]", "[0.5]", "f: 0.5 is no size of a block"},
           {"[0]", "[9223372036854775808]", "f: 9223372036854775808 is no size of a block"}}) {
    CHECK_THROWS_WITH(parse_block_of(offsets, sizes), text);
  }
  std::string many = "[0";
  for (int i = 0; i < 64; ++i) {
    many += ",0";
  }
  CHECK_THROWS_WITH(parse_block_of(many + "]", many + "]"), "f: a block has more than 64 dims");
  CHECK_THROWS_WITH(parse_block_of("[\"" + std::string(100000, 'x') + "\"]", "[1]"),
                    "f: \"" + std::string(79, 'x') + "... is no size of a block");
  for (const std::string number : {"9223372036854775808", "18446744073709551615", "1e300", "0.5", "true"}) {
    CHECK_THROWS_WITH(parse_values(R"({"user":{"step":{"int":)" + number + "}}}", "f"),
                      Catch::StartsWith("f: value 'step' is no integer of 64 bits: "));
    CHECK_THROWS_WITH(parse_manifest(R"({"tessera_checkpoint":)" + number + "}", "f"),
                      Catch::EndsWith("is no version of the format"));
  }
}

TEST_CASE("mutated content of a manifest, with the right checksum, is refused or used, and nothing else happens") {
  const auto text = format_manifest(example_manifest());
  const std::string begin = R"("content":)", file = "f";
  const auto content = text.substr(text.find(begin) + begin.size());
  const Sizes w{2, 3};
  const int refused = count_refused(content.substr(0, content.size() - 2), 20000, 5, [&](const std::string& mutation) {
    const auto manifest = parse_manifest(with_content(mutation), "f");
    for (const auto& [name, described] : manifest.files) {
      for (const auto& [key, blocks] : described.tensors) {
        std::vector<ShardSlice> slices;
        for (const auto& block : blocks) {
          slices.push_back(block.slice);
        }
        check_cover(key, w, slices, [&](size_t) -> const std::string& { return file; });
      }
    }
  });
  CHECK(refused > 10000);
  CHECK(refused < 20000);
}

TEST_CASE("mutated manifests and indexes are refused, and nothing else happens") {
  const auto manifest = format_manifest(example_manifest());
  CHECK(count_refused(manifest, 10000, 2, [](const std::string& text) { parse_manifest(text, "f"); }) > 9000);
  const auto index = format_index({{"in.weight", "a.safetensors"}, {"out.weight", "b.safetensors"}}, 100);
  CHECK(count_refused(index, 10000, 3, [](const std::string& text) { parse_index(text, "f"); }) > 4000);
  CHECK(count_refused(R"({"w":{"saved_offsets":[0,3]},"b":{"saved_offsets":[]}})", 10000, 4,
                      [](const std::string& text) { parse_sharding_info(text, "f"); }) > 4000);
}

TEST_CASE("a plan gives every element one writer, and copies to all their holders in turn") {
  const auto w = [](int64_t offset, int64_t rows) {
    return ShardEntry{.key = "w", .sizes = {4, 5}, .slice = {.offsets = {offset, 0}, .sizes = {rows, 5}}};
  };
  const ShardEntry b{.key = "b", .dtype = ScalarType::Double, .sizes = {5}, .slice = {.offsets = {0}, .sizes = {5}}};
  const ShardEntry moment{
      .section = Section::Optimizer, .key = "m", .sizes = {8}, .slice = {.offsets = {0}, .sizes = {8}}};
  const auto plan = make_save_plan({{w(0, 3), b, moment}, {w(3, 1), b, moment}}, {.max_block_bytes = 16});
  REQUIRE(plan.files.size() == 2);
  CHECK(plan.files[0].name == "model-00001-of-00001.safetensors");
  CHECK(plan.files[1].name == "optimizer-00001-of-00001.safetensors");
  CHECK(plan.files[0].header.entries ==
        std::vector<SafetensorsEntry>{
            {.key = "b", .dtype = ScalarType::Double, .sizes = {5}, .begin = 0, .end = 40},
            {.key = "w", .dtype = ScalarType::Float, .sizes = {4, 5}, .begin = 40, .end = 120}});
  CHECK(plan.files[1].header.entries[0].key == "optimizer.m");
  std::vector<std::string> blocks;
  std::vector<int64_t> bytes(2);
  for (const auto& block : plan.blocks) {
    const auto& entry = plan.entry(block);
    blocks.push_back(fmt::format("{} {} {}", entry.key, block.slice.to_string(), block.owner));
    bytes[static_cast<size_t>(block.owner)] += block.slice.numel() * (entry.key == "b" ? 8 : 4);
  }
  // w alone gives rank 0 60 bytes and rank 1 20; the copies of b and m (72 bytes) go where there is less.
  CHECK(bytes == std::vector<int64_t>{76, 76});
  CHECK(blocks == std::vector<std::string>{"b [0:2] 1", "b [2:4] 1", "b [4:5] 1", "w [0:1, 0:4] 0", "w [0:1, 4:5] 0",
                                           "w [1:2, 0:4] 0", "w [1:2, 4:5] 0", "w [2:3, 0:4] 0", "w [2:3, 4:5] 0",
                                           "w [3:4, 0:4] 1", "w [3:4, 4:5] 1", "optimizer.m [0:4] 0",
                                           "optimizer.m [4:8] 1"});
}

TEST_CASE("plain tensors are written by the first rank that has them, which counts in the even shares") {
  const auto entry = [](const char* key, bool is_plain) {
    return ShardEntry{.key = key, .sizes = {4}, .slice = {.offsets = {0}, .sizes = {4}}, .is_plain = is_plain};
  };
  const auto mean = entry("mean", true), variance = entry("variance", true), w = entry("w", false);
  const auto plan = make_save_plan({{w}, {mean, variance, w}, {mean, variance}}, {.max_block_bytes = 8});
  std::vector<std::string> owners;
  for (const auto& block : plan.blocks) {
    owners.push_back(fmt::format("{} {}", plan.entry(block).key, block.owner));
  }
  CHECK(owners == std::vector<std::string>{"mean 1", "mean 1", "variance 1", "variance 1", "w 0", "w 0"});
  const auto odd = entry("", true), blank = entry(" 3 a\n\xff", false);
  CHECK(parse_shard_entries(format_shard_entries({mean, odd, blank, w})) == std::vector{mean, odd, blank, w});
}

TEST_CASE("a DTensor is written by the mesh of the first rank that has it, and by no other replica") {
  const auto entry = [](const char* key, uint64_t mesh, int64_t offset, int64_t numel) {
    return ShardEntry{.key = key, .sizes = {4}, .slice = {.offsets = {offset}, .sizes = {numel}}, .mesh = mesh};
  };
  const auto cut = [&](uint64_t mesh, int64_t offset) { return entry("cut", mesh, offset, 2); };
  const auto copy = [&](uint64_t mesh) { return entry("copy", mesh, 0, 4); };
  const auto plan =
      make_save_plan({{}, {cut(7, 0), copy(7)}, {cut(7, 2), copy(7)}, {cut(8, 0), copy(8)}, {cut(8, 2), copy(8)}},
                     {.max_block_bytes = 4});
  std::vector<std::string> owners;
  for (const auto& block : plan.blocks) {
    owners.push_back(fmt::format("{} {}", plan.entry(block).key, block.owner));
  }
  CHECK(owners == std::vector<std::string>{"copy 1", "copy 2", "copy 1", "copy 2", "cut 1", "cut 1", "cut 2", "cut 2"});
  CHECK(parse_shard_entries(format_shard_entries({cut(~uint64_t{0}, 2)})) == std::vector{cut(~uint64_t{0}, 2)});
  CHECK_THROWS_WITH(make_save_plan({{cut(7, 0)}, {}, {cut(8, 0)}, {cut(8, 2)}}),
                    "save: 'cut': the ranks that save it together hold 2 of its 4 elements");
}

TEST_CASE("tensors go to further files where one would be too long") {
  std::vector<ShardEntry> entries;
  for (const std::string key : {"a", "b", "c", "d"}) {
    entries.push_back({.key = key, .sizes = {10}, .slice = {.offsets = {0}, .sizes = {10}}});
  }
  const auto plan = make_save_plan({entries}, {.max_file_bytes = 80});
  REQUIRE(plan.files.size() == 2);
  CHECK(plan.files[1].name == "model-00002-of-00002.safetensors");
  CHECK(plan.files[1].header.entries[1].key == "d");
  CHECK(make_save_plan({entries}, {.max_file_bytes = 1}).files.size() == 4);
}

TEST_CASE("ranks that disagree, and parts that do not make the tensor, are refused") {
  const auto entry = [](Sizes sizes, ShardSlice slice, ScalarType dtype = ScalarType::Float) {
    return ShardEntry{.key = "w", .dtype = dtype, .sizes = std::move(sizes), .slice = std::move(slice)};
  };
  CHECK_THROWS_WITH(make_save_plan({{entry({4}, {{0}, {2}})}, {entry({5}, {{2}, {2}})}}),
                    "save: the ranks differ in 'w': rank 0 has F32[4], rank 1 has F32[5]");
  CHECK_THROWS_WITH(make_save_plan({{entry({4}, {{0}, {2}})}, {entry({4}, {{2}, {2}}, ScalarType::Half)}}),
                    "save: the ranks differ in 'w': rank 0 has F32[4], rank 1 has F16[4]");
  CHECK_THROWS_WITH(make_save_plan({{entry({4}, {{0}, {2}})}, {entry({4}, {{3}, {1}})}}),
                    "save: 'w': the ranks that save it together hold 3 of its 4 elements");
  CHECK_THROWS_WITH(make_save_plan({{entry({4}, {{0}, {3}})}, {entry({4}, {{2}, {1}})}}),
                    "save: 'w': rank 0 holds [0:3] and rank 1 holds [2:3], which overlap");
}

}  // namespace tessera::dcp
