#include "data/text_source.h"

#include <fmt/format.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "testing/expect.h"
#include "testing/temp_folder.h"
#include "tests/data/byte_tokenizer.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using data::Chats;
using data::Documents;
using data::JsonLines;
using data::TextFiles;
using data::tokenize;
using data::TokenizeOptions;

constexpr TokenizeOptions kPlain{.add_special_tokens = false};

/// Returns the ids of a document as text, "#" for those that are no byte.
std::string text_of(const Documents& documents, size_t document) {
  const int64_t begin = documents.starts()[document], end = documents.starts()[document + 1];
  std::vector<int64_t> ids(static_cast<size_t>(end - begin));
  documents.copy_ids(begin, end, ids.data());
  std::string text;
  for (const int64_t id : ids) {
    text += id < 256 ? static_cast<char>(id) : '#';
  }
  return text;
}

std::vector<std::string> texts_of(const Documents& documents) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < static_cast<size_t>(documents.num_documents()); ++i) {
    texts.push_back(text_of(documents, i));
  }
  return texts;
}

using Texts = std::vector<std::string>;

Chats chats_of(const std::string& path) {
  return {.paths = {path}, .chat_template = ChatTemplate::named("chatml")};
}

void expect_refused_chat(const std::string& line, const std::string& message) {
  const TempFolder folder;
  const auto path = write_file(folder, "c.jsonl", "\n" + line);
  INFO(line);
  try {
    tokenize(chats_of(path), byte_tokenizer(), kPlain);
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    CHECK_THAT(error.what(), Catch::Matchers::ContainsSubstring("c.jsonl:2" + message));
  }
}

}  // namespace

TEST_CASE("text files are a document each, with an EOS that is not doubled") {
  const TempFolder folder;
  const TextFiles files{{write_file(folder, "a", "one\n"), write_file(folder, "b", ""),
                         write_file(folder, "c", "two<|im_end|>"), write_file(folder, "d", "x\xFFy")}};
  CHECK(texts_of(tokenize(files, byte_tokenizer(), kPlain)) == Texts{"one\n", "two#", "x\xEF\xBF\xBDy"});
  CHECK(texts_of(tokenize(files, byte_tokenizer(), {.add_special_tokens = false, .eos_id = 257})) ==
        Texts{"one\n#", "#", "two#", "x\xEF\xBF\xBDy#"});
  CHECK(texts_of(tokenize(files, byte_tokenizer(), {})) == Texts{"#one\n", "#", "#two#", "#x\xEF\xBF\xBDy"});
  CHECK(tokenize(files, byte_tokenizer(), {}).place(3) == files.paths[3]);
}

TEST_CASE("lines of JSON are documents, in order, however many threads tokenize them") {
  const TempFolder folder;
  std::string lines, more;
  Texts expected;
  for (int i = 0; i < 700; ++i) {
    expected.push_back(fmt::format("{} {}", i, std::string(i % 13 + 1, 'x')));
    (i < 500 ? lines : more) +=
        fmt::format("{{\"id\": {}, \"t\": \"{}\"}}\r\n{}", i, expected.back(), i % 3 ? "" : " \n");
  }
  const JsonLines source{{write_file(folder, "a.jsonl", lines), write_file(folder, "b.jsonl", more)}, "t"};
  for (const int threads : {0, 1, 3}) {
    const auto documents = tokenize(source, byte_tokenizer(), {.add_special_tokens = false, .threads = threads});
    CHECK(texts_of(documents) == expected);
    CHECK(documents.place(4) == folder.path("a.jsonl:7"));
    CHECK(documents.place(500) == folder.path("b.jsonl:1"));
  }
}

TEST_CASE("lines that are no documents are named") {
  const auto refuse = [](const std::string& content, const std::string& message) {
    const TempFolder folder;
    const auto path = write_file(folder, "a.jsonl", content);
    INFO(content.substr(0, 100));
    expect_throws<ValueError>([&] { tokenize(JsonLines{{path}}, byte_tokenizer(), kPlain); }, message);
  };
  const std::string good = "{\"text\": \"a\"}\n";
  refuse("", "a.jsonl: there are no documents with tokens");
  refuse("\n\n", "a.jsonl: there are no documents with tokens");
  refuse("{\"text\": \"\"}", "a.jsonl: there are no documents with tokens");
  refuse(good + "{\"txt\": \"a\"}", "a.jsonl:2: has no \"text\"");
  refuse(good + "\n{\"text\": 5}", "a.jsonl:3.text: is 5, must be a string");
  refuse(good + "[1]", "a.jsonl:2: is an array of 1, must be an object");
  refuse(good + "{\"text\": \"a\"", "a.jsonl:2: no valid JSON");
  refuse(good + "{\"text\": \"a\xFF\"}", "a.jsonl:2: no valid JSON");
  refuse(good + "{\"text\": \"a\"} {}", "a.jsonl:2: no valid JSON");
  refuse(good + std::string(10'000, '['), "a.jsonl:2: no valid JSON");
  refuse(good + std::string(10'000, '[') + std::string(10'000, ']'), "a.jsonl:2: is an array of 1, must be an object");
  expect_throws<ValueError>([] { tokenize(JsonLines{{"/nowhere.jsonl"}}, byte_tokenizer(), kPlain); },
                            "/nowhere.jsonl: cannot be read");
}

TEST_CASE("of chats, what the assistant wrote counts") {
  const TempFolder folder;
  const auto path =
      write_file(folder, "c.jsonl",
                 R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})"
                 "\n"
                 R"({"messages": [{"role": "assistant", "content": ""}, {"role": "user", "content": "c"}],)"
                 R"( "tools": null})");
  // EOS and special tokens are for texts.
  const auto documents = tokenize(chats_of(path), byte_tokenizer(), {.eos_id = 65});
  CHECK(texts_of(documents) == Texts{"#user\na#\n#assistant\nb#\n", "#assistant\n#\n#user\nc#\n"});
  std::string counts;
  for (int64_t i = 0; i < documents.num_tokens(); ++i) {
    counts += documents.counts(i) ? '1' : '.';
  }
  CHECK(counts == std::string(20, '.') + "11." + std::string(11, '.') + "1" + std::string(10, '.'));
  CHECK(documents.place(1) == folder.path("c.jsonl:2"));
}

TEST_CASE("chats that are none, or more than texts, are named") {
  expect_refused_chat("{}", ": has no \"messages\"");
  expect_refused_chat(R"({"messages": "hi"})", ".messages: is \"hi\", must be an array");
  expect_refused_chat(R"({"messages": []})", ".messages: has no message of the assistant");
  expect_refused_chat(R"({"messages": [{"role": "user", "content": "a"}]})", ".messages: has no message of the");
  expect_refused_chat(R"({"messages": ["a"]})", ".messages[0]: is \"a\", must be an object");
  expect_refused_chat(R"({"messages": [{"role": "user"}]})", ".messages[0]: has no \"content\"");
  expect_refused_chat(R"({"messages": [{"role": "user", "content": [{"type": "image"}]}]})",
                      ".messages[0].content: is an array of 1, must be a string");
  expect_refused_chat(R"({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]})",
                      ".messages[0].tool_calls: is not supported");
  expect_refused_chat(R"({"messages": [], "tools": [{}]})", ".tools: chats with tools are not supported");
  expect_refused_chat(R"({"messages": [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]})",
                      ".messages: messages[1].role: is \"tool\"");
}

TEST_CASE("texts are tokenized once if there is a cache") {
  const TempFolder folder;
  const JsonLines source{{write_file(folder, "a.jsonl", "{\"text\": \"ab\"}\n{\"text\": \"c\"}\n")}};
  const auto prefix = folder.path("cache");
  const auto open = [&](const TokenizeOptions& options) {
    return data::tokenize_cached(source, byte_tokenizer(), options, prefix);
  };
  const TokenizeOptions options{.add_special_tokens = false, .eos_id = 257, .vocab_size = 300};
  const auto first = open(options);
  CHECK(texts_of(first) == Texts{"ab#", "c#"});
  CHECK(first.fingerprint() == tokenize(source, byte_tokenizer(), options).fingerprint());
  CHECK(first.place(1) == prefix + ".bin, document 1");
  const auto written = std::filesystem::last_write_time(prefix + ".idx");
  CHECK(texts_of(open(options)) == Texts{"ab#", "c#"});
  CHECK(std::filesystem::last_write_time(prefix + ".idx") == written);
  CHECK(std::filesystem::file_size(prefix + ".bin") == 10);

  expect_throws<ValueError>([&] { open(kPlain); }, "cache.source: the cache was made from other files");
  write_file(folder, "a.jsonl", "{\"text\": \"ab\"}\n{\"text\": \"d\"}\n");
  expect_throws<ValueError>([&] { open(options); }, "Remove " + prefix + ".idx to make it anew");
  std::filesystem::remove(prefix + ".idx");
  CHECK(texts_of(open(options)) == Texts{"ab#", "d#"});
  std::filesystem::remove(prefix + ".source");
  expect_throws<ValueError>([&] { open(options); }, "cache.idx: is no cache of texts");
}

}  // namespace tessera::testing
