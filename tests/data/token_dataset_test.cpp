#include "data/token_dataset.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/token_file.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "tests/data/byte_tokenizer.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using data::Batch;
using data::Fill;
using data::LongDocuments;
using data::TokenDataset;
using data::TokenDatasetOptions;
using data::TokenFile;

using Rows = std::vector<std::vector<int64_t>>;

Rows rows_of(const at::Tensor& tensor) {
  Rows rows;
  for (int64_t i = 0; i < tensor.size(0); ++i) {
    const auto* row = tensor[i].data_ptr<int64_t>();
    rows.emplace_back(row, row + tensor.size(1));
  }
  return rows;
}

/// Writes documents of these lengths, whose ids count from `first`, and returns the prefix.
std::string write_tokens(const TempFolder& folder, const std::string& name, const std::vector<int32_t>& lengths,
                         int32_t first = 1) {
  data::TokenFileWriter writer(folder.path(name), {.vocab_size = 100'000});
  for (const int32_t length : lengths) {
    std::vector<int32_t> ids(static_cast<size_t>(length));
    std::iota(ids.begin(), ids.end(), first);
    first += length;
    writer.add(ids);
  }
  writer.finish();
  return folder.path(name);
}

/// 101 documents of 1 to 29 tokens.
std::vector<int32_t> many_lengths() {
  std::vector<int32_t> lengths(101);
  for (int i = 0; i < 101; ++i) {
    lengths[static_cast<size_t>(i)] = i * i % 29 + 1;
  }
  return lengths;
}

bool same(const Batch& a, const Batch& b) {
  return at::equal(a.ids, b.ids) && at::equal(a.labels, b.labels) && at::equal(a.segment_ids, b.segment_ids);
}

Batch joined(const std::vector<Batch>& parts) {
  std::vector<at::Tensor> ids, labels, segment_ids;
  for (const auto& part : parts) {
    ids.push_back(part.ids);
    labels.push_back(part.labels);
    segment_ids.push_back(part.segment_ids);
  }
  return {at::cat(ids), at::cat(labels), at::cat(segment_ids)};
}

/// Takes a global batch by `ranks` datasets of their own.
Batch next_of_ranks(std::vector<TokenDataset>& datasets, int64_t global_batch) {
  std::vector<Batch> parts;
  const auto ranks = static_cast<int64_t>(datasets.size());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    parts.push_back(datasets[static_cast<size_t>(rank)].next_batch(global_batch, {.rank = rank, .ranks = ranks}));
  }
  return joined(parts);
}

TokenDatasetOptions two_sources(const TempFolder& folder) {
  return {.sources = {{.source = TokenFile{write_tokens(folder, "many", many_lengths())}, .weight = 3},
                      {.source = TokenFile{write_tokens(folder, "few", {5, 30, 2}, 5000)}, .weight = 1}},
          .sequence_length = 16,
          .seed = 7};
}

}  // namespace

TEST_CASE("packed documents are segments, whose first tokens nothing predicts") {
  const TempFolder folder;
  const TokenDataset dataset({.sources = {{.source = TokenFile{write_tokens(folder, "t", {5, 2, 6})}}},
                              .sequence_length = 8,
                              .pad_id = 99,
                              .shuffle = false});
  CHECK(dataset.samples_per_epoch() == 2);
  CHECK(dataset.num_tokens() == 13);
  const auto batch = dataset.samples(0, 2);
  CHECK(rows_of(batch.ids) == Rows{{1, 2, 3, 4, 5, 6, 7, 8}, {9, 10, 11, 12, 13, 99, 99, 99}});
  CHECK(rows_of(batch.labels) == Rows{{-100, 2, 3, 4, 5, -100, 7, -100}, {-100, 10, 11, 12, 13, -100, -100, -100}});
  CHECK(rows_of(batch.segment_ids) == Rows{{0, 0, 0, 0, 0, 1, 1, 2}, {0, 0, 0, 0, 0, 1, 1, 1}});
  CHECK(same(dataset.samples(4, 2), batch));
}

TEST_CASE("padded documents are samples, and longer ones are refused or cut") {
  const TempFolder folder;
  TokenDatasetOptions options{.sources = {{.source = TokenFile{write_tokens(folder, "t", {2, 5, 4})}}},
                              .sequence_length = 4,
                              .fill = Fill::Pad,
                              .shuffle = false};
  expect_throws<ValueError>([&] { TokenDataset{options}; },
                            "t.bin, document 1: has 5 tokens, more than the 4 of sequence_length");
  options.long_documents = LongDocuments::Cut;
  const auto batch = TokenDataset(options).samples(0, 3);
  CHECK(rows_of(batch.ids) == Rows{{1, 2, 0, 0}, {3, 4, 5, 6}, {8, 9, 10, 11}});
  CHECK(rows_of(batch.labels) == Rows{{-100, 2, -100, -100}, {-100, 4, 5, 6}, {-100, 9, 10, 11}});
  CHECK(rows_of(batch.segment_ids) == Rows{{0, 0, 1, 1}, {0, 0, 0, 0}, {0, 0, 0, 0}});
}

TEST_CASE("of chats, labels are the assistant's tokens") {
  const TempFolder folder;
  const auto path = write_file(
      folder, "c.jsonl", R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})");
  const TokenDataset dataset({.sources = {{.source = data::Chats{{path}, ChatTemplate::named("chatml")}}},
                              .tokenizer = byte_tokenizer(),
                              .sequence_length = 24,
                              .fill = Fill::Pad});
  const auto labels = rows_of(dataset.samples(0, 1).labels)[0];
  std::vector<int64_t> expected(24, -100);
  expected[20] = 'b';
  expected[21] = 257;
  CHECK(labels == expected);
}

TEST_CASE("an epoch has each sample once, and another order than the next") {
  const TempFolder folder;
  TokenDataset dataset({.sources = {{.source = TokenFile{write_tokens(folder, "t", many_lengths())}}},
                        .sequence_length = 16,
                        .seed = 3});
  const int64_t epoch = dataset.samples_per_epoch();
  const auto first = rows_of(dataset.next_batch(epoch).ids);
  const auto second = rows_of(dataset.next_batch(epoch).ids);
  CHECK(first != second);
  const std::multiset<std::vector<int64_t>> first_set(first.begin(), first.end());
  CHECK(first_set == std::multiset<std::vector<int64_t>>(second.begin(), second.end()));
  int64_t tokens = 0;
  std::set<int64_t> ids;
  for (const auto& row : first) {
    for (const int64_t id : row) {
      tokens += id > 0;
      ids.insert(id);
    }
  }
  CHECK(tokens == dataset.num_tokens());
  CHECK(ids.size() == static_cast<size_t>(tokens) + 1);
}

TEST_CASE("global batches do not depend on the number of ranks, nor on their sizes") {
  const TempFolder folder;
  const auto options = two_sources(folder);
  const auto expected = TokenDataset(options).samples(0, 60);
  for (const size_t ranks : {1, 2, 3, 4}) {
    std::vector<TokenDataset> datasets;
    for (size_t rank = 0; rank < ranks; ++rank) {
      datasets.emplace_back(options);
    }
    std::vector<Batch> batches;
    for (const int64_t global_batch : {4, 7, 5, 16, 28}) {
      batches.push_back(next_of_ranks(datasets, global_batch));
    }
    INFO(ranks << " ranks");
    CHECK(same(joined(batches), expected));
    CHECK(datasets[0].next_sample() == 60);
  }
}

TEST_CASE("sources take turns by their weights, each with all of its samples") {
  const TempFolder folder;
  TokenDataset dataset(two_sources(folder));
  std::map<std::vector<int64_t>, int> few;
  int many = 0;
  for (const auto& row : rows_of(dataset.next_batch(48).ids)) {
    if (row[0] >= 5000) {
      ++few[row];
    } else {
      ++many;
    }
  }
  CHECK(many == 36);
  CHECK(few.size() == 3);  // 37 tokens
  CHECK(std::ranges::all_of(few, [](const auto& item) { return item.second == 4; }));
}

TEST_CASE("training resumes on another number of ranks with the same batches") {
  const TempFolder folder;
  const auto options = two_sources(folder);
  TokenDataset whole(options);
  const auto expected = whole.samples(21, 20);

  std::vector<TokenDataset> before(3, TokenDataset(options));
  for (int step = 0; step < 3; ++step) {
    next_of_ranks(before, 7);
  }
  const auto state = before[2].state_dict("train");
  CHECK(std::get<int64_t>(state.at("train.next_sample")) == 21);
  CHECK(state.size() == 3);
  for (const size_t ranks : {1, 2, 4}) {
    std::vector<TokenDataset> after(ranks, TokenDataset(options));
    for (auto& dataset : after) {
      dataset.load_state_dict(state, "train");
    }
    CHECK(same(joined({next_of_ranks(after, 5), next_of_ranks(after, 15)}), expected));
  }
}

TEST_CASE("a state of other data, options or seed is refused") {
  const TempFolder folder;
  const auto options = two_sources(folder);
  const auto state = TokenDataset(options).state_dict();
  const auto refuse = [&](TokenDatasetOptions changed, const std::string& message) {
    TokenDataset dataset(std::move(changed));
    expect_throws<ValueError>([&] { dataset.load_state_dict(state); }, message);
    CHECK(dataset.next_sample() == 0);
  };
  const auto with = [&](auto change) {
    auto changed = options;
    change(changed);
    return changed;
  };
  refuse(with([](auto& o) { o.seed = 8; }), "the state is of seed 7, this dataset has seed 8");
  refuse(with([](auto& o) { o.sequence_length = 17; }), "\"samples of 16 tokens, packed, shuffled;");
  refuse(with([](auto& o) { o.shuffle = false; }), "these are \"samples of 16 tokens, packed, in order;");
  refuse(with([](auto& o) { o.sources[0].weight = 2; }), "weight 2: ");
  refuse(with([](auto& o) { std::swap(o.sources[0].source, o.sources[1].source); }), "other data or options");
  auto lengths = many_lengths();
  write_tokens(folder, "other", lengths, 2);
  refuse(with([&](auto& o) { o.sources[0].source = TokenFile{folder.path("other")}; }), "other data or options");
  std::swap(lengths[3], lengths[4]);
  write_tokens(folder, "lengths", lengths);
  refuse(with([&](auto& o) { o.sources[0].source = TokenFile{folder.path("lengths")}; }), "other data or options");

  TokenDataset dataset(options);
  expect_throws<KeyError>([&] { dataset.load_state_dict(state, "train"); }, "has no \"train.next_sample\"");
  auto negative = state;
  negative["data.next_sample"] = int64_t{-1};
  expect_throws<ValueError>([&] { dataset.load_state_dict(negative); }, "is -1, must be 0 or more");
  negative["data.next_sample"] = 1.0;
  expect_throws<ValueError>([&] { dataset.load_state_dict(negative); }, "\"data.next_sample\" is of another type");
}

TEST_CASE("options and calls out of range are refused") {
  const TempFolder folder;
  const auto options = two_sources(folder);
  const auto refuse = [&](auto change, const std::string& message) {
    auto changed = options;
    change(changed);
    expect_throws<ValueError>([&] { TokenDataset{changed}; }, message);
  };
  refuse([](auto& o) { o.sources.clear(); }, "sources is empty");
  refuse([](auto& o) { o.sequence_length = 1; }, "sequence_length is 1, must be 2 or more");
  refuse([](auto& o) { o.sources[1].weight = 0; }, "sources[1].weight is 0, must be more than 0");
  refuse([](auto& o) { o.sources[1].cache = "c"; }, "sources[1].cache: only TextFiles and JsonLines have one");
  refuse([](auto& o) { o.vocab_size = 5000; }, "few.bin, document 0: its token 0 has id 5000, must be from 0 to 4999");
  refuse([](auto& o) { o.pad_id = -1; }, "pad_id is -1");
  refuse([](auto& o) { o.sources[0].source = data::TextFiles{{"a"}}; }, "texts and chats need options.tokenizer");
  TokenDataset dataset(options);
  expect_throws<ValueError>([&] { dataset.next_batch(2, {.rank = 0, .ranks = 3}); }, "a sample for each of 3 ranks");
  expect_throws<ValueError>([&] { dataset.next_batch(4, {.rank = 3, .ranks = 3}); }, "rank 3 of 3 ranks");
  expect_throws<ValueError>([&] { dataset.samples(-1, 2); }, "first=-1");
  CHECK(dataset.next_sample() == 0);
}

TEST_CASE("ranks that open a dataset together all throw, or none") {
  const TempFolder folder;
  const auto options = two_sources(folder);
  const auto bad = write_file(folder, "bad.jsonl", "{\"text\": 5}");
  run_ranks(3, [&](int rank) {
    auto own = options;
    own.mesh = init_device_mesh(at::kCPU, {3});
    const auto batch = TokenDataset(own).next_batch(4, {.rank = rank, .ranks = 3});
    expect_equal(batch.ids.size(0), rank == 2 ? 2 : 1);

    auto broken = own;
    broken.tokenizer = byte_tokenizer();
    if (rank == 1) {
      broken.sources[0].source = data::JsonLines{{bad}};
    }
    expect_throws<ValueError>([&] { TokenDataset{broken}; }, "bad.jsonl:1.text: is 5");
    auto other = own;
    other.seed = rank == 2 ? 8 : 7;
    expect_throws<ValueError>([&] { TokenDataset{other}; }, "seed");
    if (rank == 0) {
      other.sources.pop_back();
    }
    other.seed = 7;
    expect_throws<ValueError>([&] { TokenDataset{other}; }, "TokenDataset");
  });
}

}  // namespace tessera::testing
