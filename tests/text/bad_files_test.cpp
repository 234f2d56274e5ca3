// Files that are damaged or ask for what is not there, and texts of unusual size.

#include <fmt/format.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "testing/expect.h"
#include "testing/temp_folder.h"
#include "text/pattern.h"
#include "text/tokenizer.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using nlohmann::json;

json added_token(int id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

json small_file() {
  return {{"version", "1.0"},
          {"added_tokens", json::array({added_token(4, "<s>")})},
          {"model",
           {{"type", "BPE"},
            {"unk_token", nullptr},
            {"vocab", {{"a", 0}, {"b", 1}, {"ab", 2}, {"\u2581", 3}}},
            {"merges", json::array({json::array({"a", "b"})})}}}};
}

Tokenizer load(const json& file) {
  return Tokenizer::from_json(file.dump(), "t.json");
}

template <class Failure>
void expect_refused(const std::function<void(json&)>& change, const std::string& part) {
  INFO(part);
  auto file = small_file();
  change(file);
  expect_throws<Failure>([&] { load(file); }, part);
}

json regex_split(const std::string& expression) {
  return {{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}, {"invert", false}};
}

}  // namespace

TEST_CASE("types that are not supported are named") {
  const auto refuse = [](const std::string& key, const std::string& type) {
    expect_refused<NotImplementedError>(
        [&](json& file) {
          file[key] = {{"type", type}};
        },
        fmt::format("t.json.{}.type: \"{}\"", key, type));
  };
  refuse("normalizer", "Precompiled");
  refuse("pre_tokenizer", "UnicodeScripts");
  refuse("model", "Unigram");
  refuse("post_processor", "BertProcessing");
  refuse("decoder", "WordPiece");
  expect_refused<NotImplementedError>(
      [](json& file) {
        file["normalizer"] = {{"type", "Sequence"},
                              {"normalizers", json::array({json{{"type", "NFC"}}, json{{"type", "Nmt"}}})}};
      },
      "t.json.normalizer.normalizers[1].type: \"Nmt\"");
  expect_refused<NotImplementedError>([](json& file) { file["model"]["dropout"] = 0.1; },
                                      "t.json.model.dropout: is 0.1");
  expect_refused<NotImplementedError>(
      [](json& file) {
        file["truncation"] = {{"max_length", 8}};
      },
      "t.json.truncation");
  expect_refused<NotImplementedError>([](json& file) { file["model"]["end_of_word_suffix"] = "</w>"; },
                                      "t.json.model.end_of_word_suffix: is \"</w>\"");
}

TEST_CASE("files that contradict themselves are refused with the place") {
  expect_refused<ValueError>(
      [](json& file) {
        file["model"]["merges"].push_back(json::array({"a", "x"}));
      },
      "t.json.model.merges[1]: \"x\" is not in t.json.model.vocab");
  expect_refused<ValueError>(
      [](json& file) {
        file["model"]["merges"].push_back(json::array({"b", "a"}));
      },
      "\"ba\" is not in");
  expect_refused<ValueError>([](json& file) { file["model"]["merges"].push_back("a"); }, "merges[1]: is \"a\"");
  expect_refused<ValueError>(
      [](json& file) {
        file["model"]["merges"].push_back(json::array({"a", 1}));
      },
      "merges[1]: is an array");
  expect_refused<ValueError>([](json& file) { file["model"]["vocab"]["c"] = 0; },
                             "t.json.model.vocab: \"a\" and \"c\" both have id 0");
  expect_refused<ValueError>([](json& file) { file["model"]["vocab"]["c"] = -1; }, "t.json.model.vocab.c: is -1");
  expect_refused<ValueError>([](json& file) { file["model"]["vocab"]["c"] = 4000000000; }, "vocab.c: is 4000000000");
  expect_refused<ValueError>([](json& file) { file["model"].erase("vocab"); }, "t.json.model: has no \"vocab\"");
  expect_refused<ValueError>([](json& file) { file.erase("model"); }, "t.json: has no \"model\"");
  expect_refused<ValueError>([](json& file) { file["added_tokens"][0]["id"] = 7; },
                             "t.json.added_tokens[0].id: is 7, must be 4");
  expect_refused<ValueError>([](json& file) { file["added_tokens"][0].erase("lstrip"); }, "has no \"lstrip\"");
  expect_refused<ValueError>([](json& file) { file["pre_tokenizer"] = regex_split("a("); },
                             "t.json.pre_tokenizer.pattern.Regex: the regular expression \"a(\" is invalid at byte 2");
  expect_refused<ValueError>(
      [](json& file) {
        file["pre_tokenizer"] = regex_split("a");
        file["pre_tokenizer"]["behavior"] = "isolated";
      },
      "t.json.pre_tokenizer.behavior: is \"isolated\"");
  expect_throws<ValueError>([] { Tokenizer::from_file("/nowhere/tokenizer.json"); }, "/nowhere/tokenizer.json");
}

TEST_CASE("truncated and deeply nested files are refused") {
  const auto whole = small_file().dump();
  for (size_t length = 0; length < whole.size(); ++length) {
    expect_throws<ValueError>([&] { Tokenizer::from_json(std::string_view(whole).substr(0, length), "t.json"); },
                              "t.json: no valid JSON");
  }
  constexpr size_t kDepth = 10'000;
  const auto nested = std::string(kDepth, '[') + std::string(kDepth, ']');
  expect_throws<ValueError>([&] { Tokenizer::from_json(nested, "t.json"); }, "t.json: is an array of 1");
  std::string sequences;
  for (size_t i = 0; i < kDepth; ++i) {
    sequences += R"({"type": "Sequence", "normalizers": [)";
  }
  sequences += R"({"type": "NFC"})";
  for (size_t i = 0; i < kDepth; ++i) {
    sequences += "]}";
  }
  expect_throws<ValueError>([&] { Tokenizer::from_json(R"({"normalizer": )" + sequences + "}", "t.json"); },
                            "nested more than 16 deep");
}

TEST_CASE("a vocabulary may have holes, and ids without a token decode to nothing") {
  auto file = small_file();
  file["added_tokens"] = json::array();
  file["model"]["vocab"]["c"] = 1'000'000;
  const auto tokenizer = load(file);
  CHECK(tokenizer.encode("cab") == std::vector<int32_t>{1'000'000, 2});
  CHECK(tokenizer.decode({1'000'000, 999'999, -1, 2}) == "c ab");
  CHECK(tokenizer.vocab_size() == 5);
  CHECK_FALSE(tokenizer.id_to_token(999'999));
  CHECK_FALSE(tokenizer.token_to_id("ba"));
}

TEST_CASE("a missing unk_token is an error once it is needed") {
  auto file = small_file();
  file["model"]["unk_token"] = "<unk>";
  const auto tokenizer = load(file);
  CHECK(tokenizer.encode("ab") == std::vector<int32_t>{2});
  expect_throws<ValueError>([&] { tokenizer.encode("abx"); }, "t.json.model.unk_token: \"<unk>\"");
  expect_throws<ValueError>([&] { tokenizer.encode_batch({"ab", "x", "a"}, 2); }, "t.json.model.unk_token: \"<unk>\"");
}

TEST_CASE("expressions that PCRE2 and Oniguruma take in different senses are refused") {
  for (const std::string expression : {"a{2}+", "a{2}?", "a{,2}", "[a[b]]", "[a&&b]", R"(\bx)", R"(\h)", "(?m:.)",
                                       "(?<n>a)", R"([\W])", "a(?i)b", R"(\x41)"}) {
    INFO(expression);
    expect_throws<NotImplementedError>([&] { text::pcre2_syntax(expression, "place"); },
                                       "place: the regular expression \"" + expression + "\" has ");
  }
  CHECK(text::pcre2_syntax(R"([^\s\p{L}]+\d{1,3}|\u00e9\p{Han}^)", "") ==
        R"([^\t-\r\x{85}\p{Z}\p{L}]+\d{1,3}|\x{00e9}\p{sc:Han}(?m:^))");
}

TEST_CASE("words of megabytes are tokenized") {
  constexpr size_t kPairs = 5'000'000;
  auto file = small_file();
  std::string text;
  for (size_t i = 0; i < kPairs; ++i) {
    text += "ab";
  }
  const auto is_all_pairs = [](const std::vector<int32_t>& ids) { return ids == std::vector<int32_t>(kPairs, 2); };
  CHECK(is_all_pairs(load(file).encode(text)));
  file["pre_tokenizer"] = regex_split(R"((?:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\s+(?!\S)|\s+)");
  CHECK(is_all_pairs(load(file).encode(text)));
  // A group that repeats needs memory for each time.
  file["pre_tokenizer"] = regex_split("(?:a|b)+");
  expect_throws<ValueError>([&] { load(file).encode(text); }, "gave up on 10000000 bytes of text at byte 0");
  CHECK(load(file).encode("abab") == std::vector<int32_t>{2, 2});
  file["pre_tokenizer"] = regex_split(R"(\s*[\r\n]+|\s+(?!\S)|\s+)");
  CHECK(load(file).encode(std::string(kPairs, ' ') + "a" + std::string(kPairs, '\n')) == std::vector<int32_t>{0});
}

TEST_CASE("a text may have NUL bytes") {
  auto file = small_file();
  file["model"]["vocab"][std::string("\0", 1)] = 4;
  file["added_tokens"] = json::array();
  const auto tokenizer = load(file);
  CHECK(tokenizer.encode(std::string_view("a\0b", 3)) == std::vector<int32_t>{0, 4, 1});
  CHECK(tokenizer.decode({4, 4}) == std::string_view("\0 \0", 3));
}

}  // namespace tessera::testing
