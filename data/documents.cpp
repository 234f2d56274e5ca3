#define XXH_INLINE_ALL
#include "data/documents.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace tessera::data {

namespace {

constexpr int64_t kHashedBlocks = 256;
constexpr int64_t kHashedBlockTokens = 4096;

template <class Id>
void copy_as(const void* from, int64_t begin, int64_t end, int64_t* to) {
  const auto* bytes = static_cast<const char*>(from) + begin * static_cast<int64_t>(sizeof(Id));
  for (int64_t i = begin; i < end; ++i, bytes += sizeof(Id)) {
    Id id;
    std::memcpy(&id, bytes, sizeof id);
    *to++ = static_cast<int64_t>(id);
  }
}

}  // namespace

size_t bytes_of(TokenDtype dtype) {
  switch (dtype) {
    case TokenDtype::UInt8:
      return 1;
    case TokenDtype::UInt16:
      return 2;
    case TokenDtype::UInt32:
    case TokenDtype::Int32:
      return 4;
    case TokenDtype::Int64:
      return 8;
  }
  TESSERA_ASSERT(false, "dtype {}", static_cast<int>(dtype));
}

Documents::Documents(DocumentParts parts) : parts_(std::move(parts)) {
  auto& starts = parts_.starts;
  size_t kept = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    if (starts[i] == starts[i + 1]) {
      continue;
    }
    starts[kept] = starts[i];
    if (!parts_.origins.empty()) {
      parts_.origins[kept] = parts_.origins[i];
    }
    ++kept;
  }
  starts[kept] = starts.back();
  starts.resize(kept + 1);
  parts_.origins.resize(std::min(kept, parts_.origins.size()));
  TESSERA_CHECK(ValueError, kept > 0, "{}: there are no documents with tokens", fmt::join(parts_.files, ", "));
}

std::string Documents::place(int64_t document) const {
  if (parts_.origins.empty()) {
    return fmt::format("{}, document {}", fmt::join(parts_.files, ", "), document);
  }
  const auto& origin = parts_.origins[static_cast<size_t>(document)];
  const auto& file = parts_.files[origin.file];
  return origin.line == 0 ? file : fmt::format("{}:{}", file, origin.line);
}

void Documents::copy_ids(int64_t begin, int64_t end, int64_t* ids) const {
  switch (parts_.dtype) {
    case TokenDtype::UInt8:
      return copy_as<uint8_t>(parts_.ids, begin, end, ids);
    case TokenDtype::UInt16:
      return copy_as<uint16_t>(parts_.ids, begin, end, ids);
    case TokenDtype::UInt32:
      return copy_as<uint32_t>(parts_.ids, begin, end, ids);
    case TokenDtype::Int32:
      return copy_as<int32_t>(parts_.ids, begin, end, ids);
    case TokenDtype::Int64:
      return copy_as<int64_t>(parts_.ids, begin, end, ids);
  }
}

void Documents::check_ids(int64_t vocab_size) const {
  std::vector<int64_t> ids;
  for (int64_t document = 0; document < num_documents(); ++document) {
    const int64_t begin = starts()[static_cast<size_t>(document)], end = starts()[static_cast<size_t>(document) + 1];
    for (int64_t at = begin; at < end; at += kHashedBlockTokens) {
      ids.resize(static_cast<size_t>(std::min(kHashedBlockTokens, end - at)));
      copy_ids(at, at + static_cast<int64_t>(ids.size()), ids.data());
      const auto bad = std::ranges::find_if(ids, [&](int64_t id) { return id < 0 || id >= vocab_size; });
      TESSERA_CHECK(ValueError, bad == ids.end(), "{}: its token {} has id {}, must be from 0 to {}, by vocab_size",
                    place(document), at - begin + (bad - ids.begin()), *bad, vocab_size - 1);
    }
  }
}

std::string Documents::fingerprint() const {
  uint64_t hash = XXH3_64bits(starts().data(), starts().size() * sizeof(int64_t));
  hash = XXH3_64bits_withSeed(parts_.counts.data(), parts_.counts.size(), hash);
  const int64_t blocks = std::min(kHashedBlocks, (num_tokens() + kHashedBlockTokens - 1) / kHashedBlockTokens);
  std::vector<int64_t> ids(static_cast<size_t>(kHashedBlockTokens));
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t last = std::max<int64_t>(num_tokens() - kHashedBlockTokens, 0);
    const int64_t begin = blocks == 1 ? 0 : last / (blocks - 1) * block + last % (blocks - 1) * block / (blocks - 1);
    const int64_t end = std::min(begin + kHashedBlockTokens, num_tokens());
    copy_ids(begin, end, ids.data());
    hash = XXH3_64bits_withSeed(ids.data(), static_cast<size_t>(end - begin) * sizeof(int64_t), hash);
  }
  return fmt::format("{} tokens of {} documents, XXH3 {:016x}", num_tokens(), num_documents(), hash);
}

}  // namespace tessera::data
