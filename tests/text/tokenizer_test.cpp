// Ids and texts as Python's `tokenizers` has them.
//
//   ./bazelw run //tests/text:text_test -- '[.long]'     # 60 MB with the tokenizers of well-known models, in minutes

#include "text/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "text/unicode.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using Ids = std::vector<int32_t>;

struct Case {
  std::string_view text;
  Ids ids;
  std::string_view decoded;
};

/// Reads what the peer wrote.
class CaseReader {
 public:
  explicit CaseReader(std::string content) : content_(std::move(content)), left_(read_length()) {}

  bool has_next() const { return left_ > 0; }

  Case next() {
    --left_;
    const auto text = read_text(), ids = read_text(), decoded = read_text();
    Case result{text, Ids(ids.size() / sizeof(int32_t)), decoded};
    std::copy(ids.begin(), ids.end(), reinterpret_cast<char*>(result.ids.data()));
    return result;
  }

 private:
  size_t read_length() {
    int32_t length = 0;
    std::memcpy(&length, content_.data() + at_, sizeof length);
    at_ += sizeof length;
    return static_cast<size_t>(length);
  }

  std::string_view read_text() {
    const size_t length = read_length();
    at_ += length;
    return std::string_view(content_).substr(at_ - length, length);
  }

  std::string content_;
  size_t at_ = 0;
  size_t left_;
};

/// Decodes id by id. Returns "" if what comes is not whole characters.
std::string decode_one_by_one(const Tokenizer& tokenizer, const Ids& ids, const DecodeOptions& options) {
  auto stream = tokenizer.decode_stream(options);
  std::string all;
  bool is_whole = true;
  const auto append = [&](const std::string& part) {
    is_whole = is_whole && text::valid_utf8_prefix(part) == part.size();
    all += part;
  };
  for (const int32_t id : ids) {
    append(stream.put(id));
  }
  append(stream.finish());
  return is_whole ? all : "";
}

void check_vocabulary(const Tokenizer& tokenizer, const std::string& path) {
  const auto vocabulary = nlohmann::json::parse(read_file(path));
  CHECK(tokenizer.vocab_size() == vocabulary.size());
  int mismatches = 0;
  for (const auto& entry : vocabulary) {
    const auto id = entry[0].get<int32_t>();
    mismatches += tokenizer.token_to_id(entry[1].get<std::string>()) != id;
    mismatches += tokenizer.id_to_token(id) != entry[2].get<std::string>();
  }
  CHECK(mismatches == 0);
}

struct Totals {
  size_t texts = 0;
  size_t bytes = 0;
  size_t ids = 0;
};

/// Returns how much was compared.
Totals check_tokenizer(const std::string& path) {
  const auto tokenizer = Tokenizer::from_file(path + ".json");
  check_vocabulary(tokenizer, path + ".vocab");
  Totals totals;
  std::vector<std::string_view> texts;
  std::vector<Ids> all_ids;
  for (CaseReader reader(read_file(path + ".cases")); reader.has_next(); ++totals.texts) {
    const Case expected = reader.next();
    INFO("text " << totals.texts << ": " << expected.text.substr(0, 300));
    const DecodeOptions options{.skip_special_tokens = totals.texts % 2 == 1};
    const auto ids = tokenizer.encode(expected.text);
    // Not CHECK(a == b), which would print megabytes.
    CHECK((ids == expected.ids));
    CHECK((tokenizer.decode(ids, options) == expected.decoded));
    CHECK((decode_one_by_one(tokenizer, ids, options) == expected.decoded));
    totals.bytes += expected.text.size();
    totals.ids += ids.size();
  }
  return totals;
}

void check_all_tokenizers(double megabytes) {
  const TempFolder folder;
  if (!run_peer_python("tokenizers", "tests/text/tokenizer_peer.py", fmt::format("{} {}", folder.path(), megabytes))) {
    return;
  }
  std::istringstream names(read_file(folder.path("names")));
  Totals all;
  int tokenizers = 0;
  for (std::string name; std::getline(names, name); ++tokenizers) {
    INFO(name);
    const auto totals = check_tokenizer(folder.path(name));
    all = {all.texts + totals.texts, all.bytes + totals.bytes, all.ids + totals.ids};
  }
  fmt::print("{} tokenizers, {} texts, {} bytes, {} ids as in Python\n", tokenizers, all.texts, all.bytes, all.ids);
  CHECK(tokenizers >= 30);
  CHECK(all.ids > 500'000);
}

/// A byte-level tokenizer that knows "a", "b", "ab" and the bytes of U+00E9.
const char* const kSmall = R"({
  "added_tokens": [{"id": 5, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true}],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
  "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                     {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                     "special_tokens": {"<s>": {"id": "<s>", "ids": [5], "tokens": ["<s>"]}}},
  "decoder": {"type": "ByteLevel"},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ã": 3, "©": 4}, "merges": ["a b"]}
})";

}  // namespace

TEST_CASE("ids and decoded texts are Python's") {
  check_all_tokenizers(2);
}

TEST_CASE("ids and decoded texts of 60 MB are Python's", "[.long]") {
  check_all_tokenizers(60);
}

TEST_CASE("special tokens are added and left out on request") {
  const auto tokenizer = Tokenizer::from_json(kSmall);
  CHECK(tokenizer.encode("abb") == Ids{5, 2, 1});
  CHECK(tokenizer.encode("abb", {.add_special_tokens = false}) == Ids{2, 1});
  CHECK(tokenizer.encode("") == Ids{5});
  CHECK(tokenizer.decode({5, 2, 1}) == "abb");
  CHECK(tokenizer.decode({5, 2, 1}, {.skip_special_tokens = false}) == "<s>abb");
  CHECK(tokenizer.vocab_size() == 6);
}

TEST_CASE("a stream holds back the start of a character, and nothing else") {
  const auto tokenizer = Tokenizer::from_json(kSmall);
  auto stream = tokenizer.decode_stream();
  CHECK(stream.put(2) == "ab");
  CHECK(stream.put(3).empty());
  CHECK(stream.put(4) == "\u00E9");
  CHECK(stream.put(3).empty());
  CHECK(stream.put(0) == "\uFFFDa");
  CHECK(stream.put(3).empty());
  CHECK(stream.finish() == "\uFFFD");
  CHECK(stream.put(0) == "a");
}

TEST_CASE("ignore_merges takes a word that is a token whole") {
  auto file = nlohmann::json::parse(kSmall);
  file["model"]["vocab"]["ba"] = 6;
  file["added_tokens"].clear();
  for (const bool ignores : {false, true}) {
    file["model"]["ignore_merges"] = ignores;
    const auto tokenizer = Tokenizer::from_json(file.dump());
    CHECK(tokenizer.encode("ba", {.add_special_tokens = false}) == (ignores ? Ids{6} : Ids{1, 0}));
    CHECK(tokenizer.encode("bab", {.add_special_tokens = false}) == Ids{1, 2});
  }
}

TEST_CASE("nothing is prepended to what a normalizer has emptied") {
  auto file = nlohmann::json::parse(kSmall);
  file["normalizer"] = nlohmann::json::parse(
      R"({"type": "Sequence", "normalizers": [{"type": "Strip", "strip_left": true, "strip_right": true},
                                              {"type": "Prepend", "prepend": "b"}]})");
  const auto tokenizer = Tokenizer::from_json(file.dump());
  CHECK(tokenizer.encode(" \u3000") == Ids{5});
  CHECK(tokenizer.encode(" a<s>a") == Ids{5, 1, 0, 5, 1, 0});
}

TEST_CASE("a batch has the ids of each text, however many threads make them") {
  const auto tokenizer = Tokenizer::from_json(kSmall);
  constexpr int kTexts = 500;
  std::vector<std::string> texts;
  texts.reserve(kTexts);
  for (int i = 0; i < kTexts; ++i) {
    texts.push_back(std::string(i % 7, 'a') + std::string(i % 5, 'b') + (i % 3 ? "" : "<s>\u00E9"));
  }
  const std::vector<std::string_view> views(texts.begin(), texts.end());
  for (const int threads : {0, 1, 2, 9}) {
    const auto batch = tokenizer.encode_batch(views, threads);
    REQUIRE(batch.size() == texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      REQUIRE(batch[i] == tokenizer.encode(texts[i]));
    }
  }
  CHECK(tokenizer.encode_batch({}, 2).empty());
}

TEST_CASE("broken UTF-8 is what Python's errors=replace makes of it") {
  const auto repaired = [](std::string_view bytes) {
    std::string text;
    const size_t rest = text::append_repaired(text, bytes);
    return rest > 0 ? text + "?" : text;
  };
  CHECK(repaired("a\xFF\xFE z") == "a\uFFFD\uFFFD z");
  CHECK(repaired("\xE2\x82(") == "\uFFFD(");
  CHECK(repaired("\xED\xA0\x80") == "\uFFFD\uFFFD\uFFFD");
  CHECK(repaired("\xF4\x90\x80\x80") == "\uFFFD\uFFFD\uFFFD\uFFFD");
  CHECK(repaired("12345678\xF0\x9F\x98") == "12345678?");
  CHECK(repaired(std::string_view("\0\xC3\xA9", 3)) == std::string_view("\0\u00E9", 3));
}

}  // namespace tessera::testing
