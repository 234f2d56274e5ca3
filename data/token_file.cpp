#include "data/token_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "data/mapped_file.h"

namespace tessera::data {

namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr size_t kHeaderBytes = kMagic.size() + sizeof(uint64_t) + sizeof(uint8_t) + 2 * sizeof(uint64_t);
constexpr int64_t kLargestUInt16Vocabulary = 65500;  // exclusive; Megatron's DType.optimal_dtype

const std::map<uint8_t, TokenDtype>& dtypes_by_code() {
  static const std::map<uint8_t, TokenDtype> dtypes = {
      {1, TokenDtype::UInt8}, {4, TokenDtype::Int32}, {5, TokenDtype::Int64}, {8, TokenDtype::UInt16}};
  return dtypes;
}

uint8_t code_of(TokenDtype dtype) {
  return std::ranges::find_if(dtypes_by_code(), [&](const auto& item) { return item.second == dtype; })->first;
}

template <class Number>
Number number_at(std::string_view bytes, size_t at) {
  Number number;
  std::memcpy(&number, bytes.data() + at, sizeof number);
  return number;
}

template <class Number>
void write_number(std::ofstream& file, Number number) {
  file.write(reinterpret_cast<const char*>(&number), sizeof number);
}

/// Sections of an .idx with consistent lengths.
struct IndexParts {
  TokenDtype dtype;
  uint64_t sequences;
  uint64_t ends;  // number of document boundaries, including the first start
  std::string_view lengths;
  std::string_view places;
  std::string_view documents;
};

IndexParts split_index(std::string_view bytes, const std::string& name) {
  TESSERA_CHECK(ValueError, bytes.substr(0, kMagic.size()) == kMagic,
                "{}: does not start with MMIDIDX, as the index of a token file does", name);
  TESSERA_CHECK(ValueError, bytes.size() >= kHeaderBytes, "{}: is truncated: it has {} bytes, its header alone {}",
                name, bytes.size(), kHeaderBytes);
  size_t at = kMagic.size();
  const auto version = number_at<uint64_t>(bytes, at);
  TESSERA_CHECK(ValueError, version == 1, "{}: is of version {}, must be of 1", name, version);
  const auto code = number_at<uint8_t>(bytes, at += sizeof version);
  const auto dtype = dtypes_by_code().find(code);
  TESSERA_CHECK(ValueError, dtype != dtypes_by_code().end(),
                "{}: has dtype {}, must be 1 (uint8), 4 (int32), 5 (int64) or 8 (uint16)", name, code);
  const auto sequences = number_at<uint64_t>(bytes, at += sizeof code);
  const auto ends = number_at<uint64_t>(bytes, at += sizeof sequences);
  at += sizeof ends;
  const uint64_t left = bytes.size() - at;
  constexpr uint64_t kPerSequence = sizeof(int32_t) + sizeof(int64_t);
  const bool fits = sequences <= left / kPerSequence && ends == (left - sequences * kPerSequence) / sizeof(int64_t) &&
                    (left - sequences * kPerSequence) % sizeof(int64_t) == 0;
  TESSERA_CHECK(ValueError, fits,
                "{}: has {} bytes, which are not those of {} sequences and {} bounds of documents: it is truncated, or "
                "of a multimodal dataset, which is not supported",
                name, bytes.size(), sequences, ends);
  const size_t places = at + sequences * sizeof(int32_t), documents = places + sequences * sizeof(int64_t);
  return {
      dtype->second,          sequences, ends, bytes.substr(at, places - at), bytes.substr(places, documents - places),
      bytes.substr(documents)};
}

}  // namespace

TokenIndex parse_token_index(std::string_view bytes, const std::string& name) {
  const auto parts = split_index(bytes, name);
  const auto token_bytes = static_cast<int64_t>(bytes_of(parts.dtype));
  std::vector<int64_t> sequence_starts = {0};
  for (uint64_t i = 0; i < parts.sequences; ++i) {
    const auto length = number_at<int32_t>(parts.lengths, i * sizeof(int32_t));
    const auto place = number_at<int64_t>(parts.places, i * sizeof(int64_t));
    TESSERA_CHECK(ValueError, length >= 0, "{}: sequence {} has length {}, must be 0 or more", name, i, length);
    TESSERA_CHECK(ValueError, place == sequence_starts.back() * token_bytes,
                  "{}: sequence {} lies at byte {} of the .bin, must be at {}, right after the one before it", name, i,
                  place, sequence_starts.back() * token_bytes);
    sequence_starts.push_back(sequence_starts.back() + length);
  }
  TokenIndex index{.dtype = parts.dtype};
  uint64_t before = 0;
  for (uint64_t i = 0; i < parts.ends; ++i) {
    const auto sequence = number_at<uint64_t>(parts.documents, i * sizeof(int64_t));
    const bool fits = i == 0 ? sequence == 0 : sequence >= before && sequence <= parts.sequences;
    TESSERA_CHECK(ValueError, fits && (i + 1 < parts.ends || sequence == parts.sequences),
                  "{}: bound {} of {} of documents is sequence {}, must go from 0 to {} in order", name, i, parts.ends,
                  sequence, parts.sequences);
    index.starts.push_back(sequence_starts[sequence]);
    before = sequence;
  }
  TESSERA_CHECK(ValueError, !index.starts.empty(), "{}: has no bounds of documents", name);
  return index;
}

Documents open_token_file(const std::string& prefix) {
  const auto idx_path = prefix + ".idx", bin_path = prefix + ".bin";
  const MappedFile idx(idx_path);
  auto index = parse_token_index(idx.bytes(), idx_path);
  const auto bin = std::make_shared<MappedFile>(bin_path);
  TESSERA_CHECK(ValueError, static_cast<int64_t>(bin->bytes().size()) == index.bytes_of_bin(),
                "{}: has {} bytes, but {} points to {}: one of them is truncated, or of another dataset", bin_path,
                bin->bytes().size(), idx_path, index.bytes_of_bin());
  return Documents({.files = {bin_path},
                    .owner = bin,
                    .ids = bin->bytes().data(),
                    .dtype = index.dtype,
                    .starts = std::move(index.starts)});
}

Documents open_raw_tokens(const std::string& path, TokenDtype dtype, std::optional<int32_t> eos_id) {
  const auto file = std::make_shared<MappedFile>(path);
  const size_t bytes = file->bytes().size(), token_bytes = bytes_of(dtype);
  TESSERA_CHECK(ValueError, bytes % token_bytes == 0,
                "{}: has {} bytes, which are no whole number of ids of {} bytes: it is truncated, or has another dtype",
                path, bytes, token_bytes);
  DocumentParts parts{.files = {path}, .owner = file, .ids = file->bytes().data(), .dtype = dtype};
  const auto tokens = static_cast<int64_t>(bytes / token_bytes);
  parts.starts = {0, tokens};
  if (eos_id) {
    const Documents whole(parts);
    parts.starts = {0};
    std::vector<int64_t> ids(4096);
    for (int64_t begin = 0; begin < tokens; begin += static_cast<int64_t>(ids.size())) {
      const int64_t end = std::min(begin + static_cast<int64_t>(ids.size()), tokens);
      whole.copy_ids(begin, end, ids.data());
      for (int64_t i = begin; i < end; ++i) {
        if (ids[static_cast<size_t>(i - begin)] == *eos_id) {
          parts.starts.push_back(i + 1);
        }
      }
    }
    parts.starts.push_back(tokens);
  }
  return Documents(std::move(parts));
}

TokenFileWriter::TokenFileWriter(std::string prefix, const TokenFileOptions& options)
    : prefix_(std::move(prefix)),
      vocab_size_(options.vocab_size),
      dtype_(vocab_size_ < kLargestUInt16Vocabulary ? TokenDtype::UInt16 : TokenDtype::Int32) {
  TESSERA_CHECK(ValueError, vocab_size_ > 0 && vocab_size_ <= int64_t{std::numeric_limits<int32_t>::max()} + 1,
                "TokenFileWriter(vocab_size={}): must be from 1 to 2^31", vocab_size_);
  unfinished_ = unfinished_name(prefix_);
  bin_.open(unfinished_ + ".bin", std::ios::binary);
  TESSERA_CHECK(ValueError, bin_, "{}.bin: cannot be written", unfinished_);
}

TokenFileWriter::~TokenFileWriter() {
  std::error_code ignored;
  std::filesystem::remove(unfinished_ + ".bin", ignored);
  std::filesystem::remove(unfinished_ + ".idx", ignored);
}

void TokenFileWriter::add(const std::vector<int32_t>& ids) {
  TESSERA_CHECK(ValueError, !ids.empty() && ids.size() <= size_t{std::numeric_limits<int32_t>::max()},
                "{}: document {} has {} ids, must have 1 to 2^31 - 1", prefix_, lengths_.size(), ids.size());
  const auto bad = std::ranges::find_if(ids, [&](int32_t id) { return id < 0 || id >= vocab_size_; });
  TESSERA_CHECK(ValueError, bad == ids.end(), "{}: id {} of document {} is {}, must be from 0 to {}", prefix_,
                bad - ids.begin(), lengths_.size(), *bad, vocab_size_ - 1);
  if (dtype_ == TokenDtype::UInt16) {
    const std::vector<uint16_t> narrow(ids.begin(), ids.end());
    bin_.write(reinterpret_cast<const char*>(narrow.data()),
               static_cast<std::streamsize>(narrow.size() * sizeof(uint16_t)));
  } else {
    bin_.write(reinterpret_cast<const char*>(ids.data()), static_cast<std::streamsize>(ids.size() * sizeof(int32_t)));
  }
  TESSERA_CHECK(ValueError, bin_, "{}.bin: writing failed", unfinished_);
  lengths_.push_back(static_cast<int32_t>(ids.size()));
}

void TokenFileWriter::write_index(const std::string& path) const {
  std::ofstream file(path, std::ios::binary);
  file.write(kMagic.data(), static_cast<std::streamsize>(kMagic.size()));
  write_number(file, uint64_t{1});
  write_number(file, code_of(dtype_));
  write_number(file, uint64_t{lengths_.size()});
  write_number(file, uint64_t{lengths_.size() + 1});
  for (const int32_t length : lengths_) {
    write_number(file, length);
  }
  int64_t place = 0;
  for (const int32_t length : lengths_) {
    write_number(file, place);
    place += length * static_cast<int64_t>(bytes_of(dtype_));
  }
  for (int64_t document = 0; document <= static_cast<int64_t>(lengths_.size()); ++document) {
    write_number(file, document);
  }
  file.close();
  TESSERA_CHECK(ValueError, file, "{}: writing failed", path);
}

void TokenFileWriter::finish() {
  TESSERA_CHECK(StateError, bin_.is_open(), "TokenFileWriter: finish() was called before");
  bin_.close();
  TESSERA_CHECK(ValueError, bin_, "{}.bin: writing failed", unfinished_);
  write_index(unfinished_ + ".idx");
  for (const char* suffix : {".bin", ".idx"}) {
    std::error_code error;
    std::filesystem::rename(unfinished_ + suffix, prefix_ + suffix, error);
    TESSERA_CHECK(ValueError, !error, "{}{}: cannot be written: {}", prefix_, suffix, error.message());
  }
}

}  // namespace tessera::data
