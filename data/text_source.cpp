#define XXH_INLINE_ALL
#include "data/text_source.h"

#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "data/json_lines.h"
#include "data/mapped_file.h"
#include "data/token_file.h"

namespace tessera::data {

namespace {

constexpr size_t kBatchBytes = size_t{16} << 20;  // text that is tokenized together

using AddDocument =
    std::function<void(const std::vector<int32_t>& ids, const std::vector<uint8_t>& counts, DocumentOrigin origin)>;

/// Collects documents in memory.
class DocumentCollector {
 public:
  void add(const std::vector<int32_t>& ids, const std::vector<uint8_t>& counts, DocumentOrigin origin) {
    ids_->insert(ids_->end(), ids.begin(), ids.end());
    parts_.counts.insert(parts_.counts.end(), counts.begin(), counts.end());
    parts_.starts.push_back(static_cast<int64_t>(ids_->size()));
    parts_.origins.push_back(origin);
  }

  Documents finish(const std::vector<std::string>& files) {
    parts_.files = files;
    parts_.owner = ids_;
    parts_.ids = ids_->data();
    return Documents(std::move(parts_));
  }

 private:
  std::shared_ptr<std::vector<int32_t>> ids_ = std::make_shared<std::vector<int32_t>>();
  DocumentParts parts_;
};

/// Calls work(0), ..., work(count - 1) on several threads. Rethrows the first error.
void in_threads(size_t count, int threads, const std::function<void(size_t)>& work) {
  const size_t wanted = threads > 0 ? static_cast<size_t>(threads) : std::max(1U, std::thread::hardware_concurrency());
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto run = [&] {
    try {
      for (size_t i = next++; i < count; i = next++) {
        work(i);
      }
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      error = error ? error : std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  for (size_t i = 1; i < std::min(wanted, count); ++i) {
    workers.emplace_back(run);
  }
  run();
  for (auto& worker : workers) {
    worker.join();
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

/// Tokenizes texts in batches.
class TextTokenizer {
 public:
  TextTokenizer(const Tokenizer& tokenizer, const TokenizeOptions& options, AddDocument add)
      : tokenizer_(tokenizer), options_(options), add_(std::move(add)) {}

  void take(std::string text, DocumentOrigin origin) {
    bytes_ += text.size();
    texts_.push_back(std::move(text));
    origins_.push_back(origin);
    if (bytes_ >= kBatchBytes) {
      finish();
    }
  }

  void finish() {
    const std::vector<std::string_view> views(texts_.begin(), texts_.end());
    auto batch = tokenizer_.encode_batch(views, options_.threads, {.add_special_tokens = options_.add_special_tokens});
    for (size_t i = 0; i < batch.size(); ++i) {
      auto& ids = batch[i];
      if (options_.eos_id && (ids.empty() || ids.back() != *options_.eos_id)) {
        ids.push_back(*options_.eos_id);
      }
      if (!ids.empty()) {
        add_(ids, {}, origins_[i]);
      }
    }
    texts_.clear();
    origins_.clear();
    bytes_ = 0;
  }

 private:
  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  AddDocument add_;
  std::vector<std::string> texts_;
  std::vector<DocumentOrigin> origins_;
  size_t bytes_ = 0;
};

/// Tokenizes chats in batches.
class ChatTokenizer {
 public:
  ChatTokenizer(const Tokenizer& tokenizer, const TokenizeOptions& options, AddDocument add)
      : tokenizer_(tokenizer), options_(options), add_(std::move(add)) {}

  void take(RenderedChat chat, DocumentOrigin origin) {
    bytes_ += chat.text.size();
    chats_.push_back(std::move(chat));
    origins_.push_back(origin);
    if (bytes_ >= kBatchBytes) {
      finish();
    }
  }

  void finish() {
    std::vector<EncodedChat> encoded(chats_.size());
    in_threads(chats_.size(), options_.threads, [&](size_t i) { encoded[i] = encode_chat(tokenizer_, chats_[i]); });
    for (size_t i = 0; i < encoded.size(); ++i) {
      add_(encoded[i].ids, encoded[i].is_assistant, origins_[i]);
    }
    chats_.clear();
    origins_.clear();
    bytes_ = 0;
  }

 private:
  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  AddDocument add_;
  std::vector<RenderedChat> chats_;
  std::vector<DocumentOrigin> origins_;
  size_t bytes_ = 0;
};

void read_texts(const TextFiles& source, TextTokenizer& texts) {
  for (size_t file = 0; file < source.paths.size(); ++file) {
    auto content = text::read_file(source.paths[file]);
    TESSERA_CHECK(ValueError, content.size() <= size_t{std::numeric_limits<int32_t>::max()},
                  "{}: has {} bytes, must have less than 2 GiB: split it", source.paths[file], content.size());
    texts.take(std::move(content), {.file = static_cast<uint32_t>(file)});
  }
}

/// Calls use(object, origin) for each line of the files.
template <class Use>
void for_each_object(const std::vector<std::string>& paths, Use use) {
  for (size_t file = 0; file < paths.size(); ++file) {
    std::ifstream lines(paths[file], std::ios::binary);
    TESSERA_CHECK(ValueError, lines, "{}: cannot be read", paths[file]);
    for_each_json_line(lines, paths[file], [&](const text::JsonView& object, uint32_t line) {
      use(object, DocumentOrigin{.file = static_cast<uint32_t>(file), .line = line});
    });
  }
}

void read_texts(const JsonLines& source, TextTokenizer& texts) {
  for_each_object(source.paths, [&](const text::JsonView& object, DocumentOrigin origin) {
    texts.take(object.at(source.key.c_str()).as_string(), origin);
  });
}

RenderedChat render_chat(const Chats& source, const text::JsonView& object) {
  const auto messages = read_chat(object, source.key);
  TESSERA_CHECK(ValueError, std::ranges::any_of(messages, [](const auto& one) { return one.role == "assistant"; }),
                "{}.{}: has no message of the assistant, so that nothing of it counts for the loss", object.path(),
                source.key);
  try {
    return source.chat_template.render(messages);
  } catch (const ValueError& error) {
    throw ValueError(fmt::format("{}.{}: {}", object.path(), source.key, error.what()));
  }
}

template <class Source>
Documents tokenize_texts(const Source& source, const Tokenizer& tokenizer, const TokenizeOptions& options) {
  DocumentCollector collector;
  TextTokenizer texts(tokenizer, options, [&](const auto& ids, const auto& counts, DocumentOrigin origin) {
    collector.add(ids, counts, origin);
  });
  read_texts(source, texts);
  texts.finish();
  return collector.finish(source.paths);
}

/// Returns a hash of the size and of 256 evenly spaced pieces.
uint64_t sampled_hash(std::string_view bytes, uint64_t seed) {
  constexpr size_t kPieces = 256, kPieceBytes = 4096;
  uint64_t hash = seed ^ bytes.size();
  for (size_t piece = 0; piece < kPieces; ++piece) {
    const auto part = bytes.substr(bytes.size() / kPieces * piece, kPieceBytes);
    hash = XXH3_64bits_withSeed(part.data(), part.size(), hash);
  }
  const auto end = bytes.substr(bytes.size() - std::min(bytes.size(), kPieceBytes));
  return XXH3_64bits_withSeed(end.data(), end.size(), hash);
}

/// Returns a description of a cache's sources, as detected from a sample.
std::string describe_source(const std::vector<std::string>& paths, const std::string& key, const Tokenizer& tokenizer,
                            const TokenizeOptions& options) {
  constexpr size_t kProbeBytes = 65536;
  uint64_t files_hash = 0, ids_hash = 0;
  for (const auto& path : paths) {
    const MappedFile file(path);
    files_hash = sampled_hash(file.bytes(), files_hash);
    const auto ids =
        tokenizer.encode(file.bytes().substr(0, kProbeBytes), {.add_special_tokens = options.add_special_tokens});
    ids_hash = XXH3_64bits_withSeed(ids.data(), ids.size() * sizeof(int32_t), ids_hash);
  }
  return fmt::format("files {} {:016x}, key \"{}\", tokenizer {} {:016x}, eos_id {}\n", paths.size(), files_hash, key,
                     tokenizer.vocab_size(), ids_hash, options.eos_id ? std::to_string(*options.eos_id) : "none");
}

void write_whole_file(const std::string& path, const std::string& content) {
  const auto unfinished = unfinished_name(path);
  std::ofstream file(unfinished, std::ios::binary);
  file << content;
  file.close();
  std::error_code error;
  std::filesystem::rename(unfinished, path, error);
  TESSERA_CHECK(ValueError, file && !error, "{}: cannot be written", path);
}

template <class Source>
void write_cache(const Source& source, const Tokenizer& tokenizer, const TokenizeOptions& options,
                 const std::string& prefix) {
  const int64_t all = int64_t{std::numeric_limits<int32_t>::max()} + 1;
  TokenFileWriter writer(prefix, {.vocab_size = options.vocab_size > 0 ? options.vocab_size : all});
  TextTokenizer texts(tokenizer, options, [&](const auto& ids, const auto&, DocumentOrigin) { writer.add(ids); });
  read_texts(source, texts);
  texts.finish();
  writer.finish();
}

}  // namespace

Documents tokenize(const TextFiles& source, const Tokenizer& tokenizer, const TokenizeOptions& options) {
  return tokenize_texts(source, tokenizer, options);
}

Documents tokenize(const JsonLines& source, const Tokenizer& tokenizer, const TokenizeOptions& options) {
  return tokenize_texts(source, tokenizer, options);
}

Documents tokenize(const Chats& source, const Tokenizer& tokenizer, const TokenizeOptions& options) {
  DocumentCollector collector;
  ChatTokenizer chats(tokenizer, options, [&](const auto& ids, const auto& counts, DocumentOrigin origin) {
    collector.add(ids, counts, origin);
  });
  for_each_object(source.paths, [&](const text::JsonView& object, DocumentOrigin origin) {
    chats.take(render_chat(source, object), origin);
  });
  chats.finish();
  return collector.finish(source.paths);
}

Documents tokenize_cached(const std::variant<TextFiles, JsonLines>& source, const Tokenizer& tokenizer,
                          const TokenizeOptions& options, const std::string& prefix) {
  const auto& paths = std::visit(
      [](const auto& one) -> const auto& { return one.paths; }, source);
  const auto* const lines = std::get_if<JsonLines>(&source);
  const auto description = describe_source(paths, lines ? lines->key : "", tokenizer, options);
  const auto note = prefix + ".source";
  if (!std::filesystem::exists(prefix + ".idx")) {
    write_whole_file(note, description);
    std::visit([&](const auto& one) { write_cache(one, tokenizer, options, prefix); }, source);
  }
  TESSERA_CHECK(ValueError, std::filesystem::exists(note),
                "{}.idx: is no cache of texts, as there is no {}: open it as a TokenFile, or name another cache",
                prefix, note);
  const auto made_from = text::read_file(note);
  TESSERA_CHECK(
      ValueError, made_from == description,
      "{}: the cache was made from other files, by another tokenizer or with other options: \"{}\", now \"{}\". "
      "Remove {}.idx to make it anew",
      note, made_from.substr(0, made_from.find('\n')), description.substr(0, description.size() - 1), prefix);
  return open_token_file(prefix);
}

}  // namespace tessera::data
