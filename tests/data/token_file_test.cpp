// Token files as Megatron-LM has them, and damaged ones.

#include "data/token_file.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "testing/expect.h"
#include "testing/peer_python.h"
#include "testing/temp_folder.h"
#include "tests/data/byte_tokenizer.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using data::Documents;
using data::TokenDtype;
using data::TokenFileWriter;
using IdLists = std::vector<std::vector<int64_t>>;

IdLists ids_of(const Documents& documents) {
  IdLists lists;
  for (size_t i = 0; i + 1 < documents.starts().size(); ++i) {
    const int64_t begin = documents.starts()[i], end = documents.starts()[i + 1];
    lists.emplace_back(static_cast<size_t>(end - begin));
    documents.copy_ids(begin, end, lists.back().data());
  }
  return lists;
}

void write_documents(const std::string& prefix, int64_t vocab_size, const std::vector<std::vector<int32_t>>& lists) {
  TokenFileWriter writer(prefix, {.vocab_size = vocab_size});
  for (const auto& ids : lists) {
    writer.add(ids);
  }
  writer.finish();
}

/// The .idx of documents of 2, 1 and 3 tokens.
std::string small_index(const TempFolder& folder) {
  write_documents(folder.path("small"), 100, {{1, 2}, {3}, {4, 5, 6}});
  return read_file(folder.path("small.idx"));
}

/// Expects what is thrown of small_index() with the byte at `at` replaced.
void expect_damage(const std::string& index, size_t at, char byte, const std::string& message) {
  auto damaged = index;
  damaged[at] = byte;
  INFO(message);
  expect_throws<ValueError>([&] { data::parse_token_index(damaged, "d.idx"); }, message);
}

}  // namespace

TEST_CASE("token files of Megatron are read and written byte by byte") {
  const TempFolder folder;
  const std::string script = "tests/data/token_file_peer.py";
  if (!run_peer_python("sys", script, "write " + folder.path())) {
    return;
  }
  const auto expected = nlohmann::json::parse(read_file(folder.path("documents.json")));
  for (const auto& [name, documents] : expected.items()) {
    INFO(name);
    CHECK(ids_of(data::open_token_file(folder.path(name))) == documents.get<IdLists>());
  }
  for (const auto& [name, vocab_size] : {std::pair("shorts", 65'499), std::pair("ints", 65'500)}) {
    std::vector<std::vector<int32_t>> lists = {{0, 1, 65'498}, {7}, {65'498, 3}};
    write_documents(folder.path("ours"), vocab_size, lists);
    std::ofstream(folder.path("ours.json")) << nlohmann::json(lists).dump();
    CHECK(run_peer_python("sys", script, fmt::format("check {0}/ours {0}/ours.json", folder.path())));
    CHECK(data::parse_token_index(read_file(folder.path("ours.idx")), name).dtype ==
          (vocab_size < 65'500 ? TokenDtype::UInt16 : TokenDtype::Int32));
    CHECK(ids_of(data::open_token_file(folder.path("ours"))) == IdLists{{0, 1, 65'498}, {7}, {65'498, 3}});
  }
  CHECK(ids_of(data::open_raw_tokens(folder.path("raw.bin"), TokenDtype::UInt32, {})) == IdLists{{7, 70'000, 5, 9}});
}

TEST_CASE("ids without a header are documents that end with eos_id") {
  const TempFolder folder;
  const auto path = write_file(folder, "raw.bin", std::string("\1\0\2\0\0\0\3\0\0\0\0\0\4\0", 14));
  const auto lists = [&](std::optional<int32_t> eos_id) {
    return ids_of(data::open_raw_tokens(path, TokenDtype::UInt16, eos_id));
  };
  CHECK(lists({}) == IdLists{{1, 2, 0, 3, 0, 0, 4}});
  CHECK(lists(0) == IdLists{{1, 2, 0}, {3, 0}, {0}, {4}});
  CHECK(lists(4) == IdLists{{1, 2, 0, 3, 0, 0, 4}});
  expect_throws<ValueError>([&] { data::open_raw_tokens(path, TokenDtype::UInt32, {}); },
                            "raw.bin: has 14 bytes, which are no whole number of ids of 4 bytes");
  write_file(folder, "empty.bin", "");
  expect_throws<ValueError>([&] { data::open_raw_tokens(folder.path("empty.bin"), TokenDtype::UInt16, {}); },
                            "empty.bin: there are no documents with tokens");
}

TEST_CASE("an .idx cut anywhere is refused") {
  const TempFolder folder;
  const auto whole = small_index(folder);
  CHECK(data::parse_token_index(whole, "d.idx").starts == std::vector<int64_t>{0, 2, 3, 6});
  for (size_t length = 0; length < whole.size(); ++length) {
    expect_throws<ValueError>([&] { data::parse_token_index(std::string_view(whole).substr(0, length), "d.idx"); },
                              "d.idx: ");
  }
  expect_throws<ValueError>([&] { data::parse_token_index(whole + "\1", "d.idx"); }, "d.idx: has 103 bytes");
}

TEST_CASE("an .idx that contradicts itself is refused with the place") {
  const TempFolder folder;
  const auto index = small_index(folder);  // 34 bytes, 3 lengths, 3 places, 4 bounds
  expect_damage(index, 0, 'X', "d.idx: does not start with MMIDIDX");
  expect_damage(index, 9, 2, "d.idx: is of version 2, must be of 1");
  expect_damage(index, 17, 7, "d.idx: has dtype 7, must be 1 (uint8)");
  expect_damage(index, 18, 4, "not those of 4 sequences and 4 bounds");
  expect_damage(index, 25, 1, "bounds of documents");
  expect_damage(index, 37, '\x80', "d.idx: sequence 0 has length -2147483646");
  expect_damage(index, 46 + 8, 3, "d.idx: sequence 1 lies at byte 3 of the .bin, must be at 4");
  expect_damage(index, 70, 1, "d.idx: bound 0 of 4 of documents is sequence 1");
  expect_damage(index, 70 + 8, 3, "d.idx: bound 2 of 4 of documents is sequence 2");
  expect_damage(index, 70 + 24, 2, "d.idx: bound 3 of 4 of documents is sequence 2, must go from 0 to 3");
  expect_damage(index, 70 + 16, 9, "d.idx: bound 2 of 4 of documents is sequence 9");
}

TEST_CASE("a .bin of another size than its .idx says is refused") {
  const TempFolder folder;
  small_index(folder);
  const auto bin = read_file(folder.path("small.bin"));
  for (const size_t length : {size_t{0}, bin.size() - 1}) {
    write_file(folder, "small.bin", bin.substr(0, length));
    expect_throws<ValueError>(
        [&] { data::open_token_file(folder.path("small")); },
        fmt::format("small.bin: has {} bytes, but {} points to 12", length, folder.path("small.idx")));
  }
  std::filesystem::remove(folder.path("small.bin"));
  expect_throws<ValueError>([&] { data::open_token_file(folder.path("small")); },
                            "small.bin: cannot be opened: No such");
  expect_throws<ValueError>([&] { data::open_token_file(folder.path("none")); }, "none.idx: cannot be opened");
}

TEST_CASE("ids that are not in the vocabulary are named with their place") {
  const TempFolder folder;
  small_index(folder);
  const auto documents = data::open_token_file(folder.path("small"));
  documents.check_ids(7);
  expect_throws<ValueError>([&] { documents.check_ids(6); },
                            "small.bin, document 2: its token 2 has id 6, must be from 0 to 5");
  TokenFileWriter writer(folder.path("w"), {.vocab_size = 5});
  writer.add({4});
  expect_throws<ValueError>([&] { writer.add({1, 5}); }, "id 1 of document 1 is 5, must be from 0 to 4");
  expect_throws<ValueError>([&] { writer.add({-1}); }, "is -1");
  expect_throws<ValueError>([&] { writer.add({}); }, "document 1 has 0 ids");
}

TEST_CASE("a file that is not finished leaves nothing behind") {
  const TempFolder folder;
  { TokenFileWriter(folder.path("w"), {.vocab_size = 5}).add({1}); }
  CHECK(std::filesystem::is_empty(folder.path()));
  expect_throws<ValueError>([&] { TokenFileWriter(folder.path("no/where"), {.vocab_size = 5}); }, "cannot be written");
}

}  // namespace tessera::testing
