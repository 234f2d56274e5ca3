#include "comm/launch/job_secret.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>

#include "base/error.h"

namespace tessera {

namespace {

using Bytes = std::span<const uint8_t>;
using Tag = std::array<uint8_t, 32>;

/// 16 bytes, the last one zero. No text of a rank without a secret begins with it.
constexpr std::array<char, 16> kMark = {"tessera tagged\n"};
constexpr size_t kLengthBytes = 8;
constexpr size_t kRecordHeadBytes = kMark.size() + sizeof(Tag) + kLengthBytes;

Bytes as_bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

void append_to(StoreValue& target, Bytes bytes) {
  target.insert(target.end(), bytes.begin(), bytes.end());
}

/// Appends the length in little-endian order.
void append_length(StoreValue& target, uint64_t length) {
  for (size_t i = 0; i < kLengthBytes; ++i) {
    target.push_back(static_cast<uint8_t>(length >> (8 * i)));
  }
}

uint64_t read_length(Bytes bytes) {
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    length |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  }
  return length;
}

Tag compute_hmac(Bytes key, Bytes text) {
  Tag tag{};
  unsigned size = 0;
  const bool is_made = HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), text.data(), text.size(),
                            tag.data(), &size) != nullptr;
  TESSERA_CHECK(Error, is_made && size == tag.size(), "libcrypto made no HMAC-SHA256 for the tag of a store's value");
  return tag;
}

/// Computes a tag. The key's length comes first, so that different pairs of key and value give different inputs.
Tag make_tag(Bytes secret, const std::string& key, Bytes value) {
  StoreValue text;
  append_length(text, key.size());
  append_to(text, as_bytes(key));
  append_to(text, value);
  return compute_hmac(secret, text);
}

struct Record {
  Bytes tag;
  Bytes value;
};

bool has_mark(Bytes stored) {
  return stored.size() >= kRecordHeadBytes && std::memcmp(stored.data(), kMark.data(), kMark.size()) == 0;
}

/// Returns no records if there is other data among them, or no data.
std::vector<Record> parse_records(Bytes stored) {
  std::vector<Record> records;
  while (has_mark(stored)) {
    const Bytes tag = stored.subspan(kMark.size(), sizeof(Tag));
    const uint64_t length = read_length(stored.subspan(kMark.size() + sizeof(Tag)));
    stored = stored.subspan(kRecordHeadBytes);
    if (length > stored.size()) {
      return {};
    }
    records.push_back({.tag = tag, .value = stored.first(length)});
    stored = stored.subspan(length);
  }
  return stored.empty() ? records : std::vector<Record>();
}

StoreValue joined_values(const std::vector<Record>& records) {
  StoreValue value;
  for (const Record& record : records) {
    append_to(value, record.value);
  }
  return value;
}

}  // namespace

std::optional<std::string> parse_job_secret(const EnvironmentLookup& lookup) {
  constexpr size_t kFewest = 16;
  std::optional<std::string> secret = lookup(kSecretVariable);
  TESSERA_CHECK(ValueError, !secret || secret->size() >= kFewest,
                "environment variable {} has {} characters; it must have at least {}, such as the output of "
                "\"openssl rand -hex 32\", or not be set",
                kSecretVariable, secret->size(), kFewest);
  return secret;
}

std::string new_job_secret() {
  std::array<uint8_t, 32> bytes;  // filled by one system call, or not at all
  const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
  TESSERA_CHECK(Error, got == static_cast<ssize_t>(bytes.size()),
                "the system gave no random bytes for the job's secret: {}; set {}", std::strerror(errno),
                kSecretVariable);
  std::string text;
  for (const uint8_t byte : bytes) {
    text += fmt::format("{:02x}", byte);
  }
  return text;
}

JobSecret::JobSecret(const std::string& secret, const std::string& job)
    : key_(compute_hmac(as_bytes(secret), as_bytes(job))) {}

StoreValue JobSecret::seal(const std::string& key, const StoreValue& value) const {
  StoreValue record(kMark.begin(), kMark.end());
  append_to(record, make_tag(key_, key, value));
  append_length(record, value.size());
  append_to(record, value);
  return record;
}

std::optional<StoreValue> JobSecret::open(const std::string& key, const StoreValue& stored) const {
  const std::vector<Record> records = parse_records(stored);
  const auto is_ours = [&](const Record& record) {
    const Tag tag = make_tag(key_, key, record.value);
    return CRYPTO_memcmp(tag.data(), record.tag.data(), tag.size()) == 0;
  };
  if (records.empty() || !std::ranges::all_of(records, is_ours)) {
    return std::nullopt;
  }
  return joined_values(records);
}

bool is_sealed(const StoreValue& stored) {
  return has_mark(stored);
}

std::string unverified_text(const StoreValue& stored) {
  const std::vector<Record> records = parse_records(stored);
  const StoreValue value = records.empty() ? stored : joined_values(records);
  return {value.begin(), value.end()};
}

}  // namespace tessera
