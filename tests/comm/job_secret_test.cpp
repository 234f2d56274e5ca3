#include "comm/launch/job_secret.h"

#include <fmt/format.h>

#include <map>
#include <string>

#include "base/error.h"
#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

using Catch::Matchers::ContainsSubstring;

const std::string kSecretOfTest = "0123456789abcdef";

StoreValue to_value(const std::string& text) {
  return {text.begin(), text.end()};
}

std::optional<std::string> secret_in(const std::map<std::string, std::string>& variables) {
  return parse_job_secret([&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

/// None: it has no right tag.
std::optional<std::string> open_text(const JobSecret& secret, const std::string& key, const StoreValue& stored) {
  const auto value = secret.open(key, stored);
  return value ? std::optional<std::string>(std::in_place, value->begin(), value->end()) : std::nullopt;
}

TEST_CASE("a value with a tag opens under its key, its secret and its job alone") {
  const JobSecret secret(kSecretOfTest, "job");
  const StoreValue stored = secret.seal("key", to_value("value"));
  CHECK(open_text(secret, "key", stored) == "value");
  CHECK(open_text(JobSecret(kSecretOfTest, "job"), "key", stored) == "value");
  CHECK_FALSE(open_text(secret, "other key", stored));
  CHECK_FALSE(open_text(JobSecret("0123456789abcdeF", "job"), "key", stored));
  CHECK_FALSE(open_text(JobSecret(kSecretOfTest, "another job"), "key", stored));
  CHECK(open_text(secret, "", secret.seal("", {})) == "");
}

TEST_CASE("what stands before and behind the end of the key is told apart") {
  const JobSecret secret(kSecretOfTest, "job");
  StoreValue stored = secret.seal("key", to_value("value"));
  const StoreValue other = secret.seal("keyv", to_value("alue"));
  CHECK(open_text(secret, "keyv", other) == "alue");
  constexpr std::ptrdiff_t kBeforeLength = 16 + 32;  // the mark and the tag
  stored.resize(kBeforeLength);
  stored.insert(stored.end(), other.begin() + kBeforeLength, other.end());
  CHECK_FALSE(open_text(secret, "keyv", stored));
}

TEST_CASE("the tag is an HMAC-SHA256, as Python's hmac makes it") {
  const StoreValue stored = JobSecret(kSecretOfTest, "job").seal("key", to_value("value"));
  std::string text;
  for (const uint8_t byte : stored) {
    text += fmt::format("{:02x}", byte);
  }
  CHECK(text ==
        "746573736572612074616767"
        "65640a00"                                                          // "tessera tagged\n\0"
        "43c7c4adfcdf97ffc56623e94e8a4071d912cd353cd9091c87d62c88e774a7bb"  // hmac(hmac(secret, job), 3, key, value)
        "0500000000000000"
        "76616c7565");
}

TEST_CASE("a value that is changed in one bit, cut or made longer does not open") {
  const JobSecret secret(kSecretOfTest, "job");
  const StoreValue stored = secret.seal("key", to_value("value"));
  for (size_t bit = 0; bit < 8 * stored.size(); ++bit) {
    StoreValue changed = stored;
    changed[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CAPTURE(bit);
    CHECK_FALSE(open_text(secret, "key", changed));
  }
  for (size_t size = 0; size < stored.size(); ++size) {
    CAPTURE(size);
    CHECK_FALSE(
        open_text(secret, "key", StoreValue(stored.begin(), stored.begin() + static_cast<std::ptrdiff_t>(size))));
  }
  StoreValue longer = stored;
  longer.push_back(0);
  CHECK_FALSE(open_text(secret, "key", longer));
}

TEST_CASE("values that were appended open together, if each has its tag") {
  const JobSecret secret(kSecretOfTest, "job");
  StoreValue stored = secret.seal("key", to_value("one, "));
  for (const std::string text : {"two, ", "three"}) {
    const StoreValue more = secret.seal("key", to_value(text));
    stored.insert(stored.end(), more.begin(), more.end());
  }
  CHECK(open_text(secret, "key", stored) == "one, two, three");
  const StoreValue strangers = JobSecret("a stranger's secret", "job").seal("key", to_value(", four"));
  stored.insert(stored.end(), strangers.begin(), strangers.end());
  CHECK_FALSE(open_text(secret, "key", stored));
  CHECK(unverified_text(stored) == "one, two, three, four");
}

TEST_CASE("the text of a value is told without a check of its tag") {
  const StoreValue stored = JobSecret(kSecretOfTest, "job").seal("key", to_value("value"));
  CHECK(is_sealed(stored));
  CHECK(unverified_text(stored) == "value");
  CHECK_FALSE(is_sealed(to_value("value")));
  CHECK(unverified_text(to_value("value")) == "value");
  CHECK_FALSE(is_sealed({}));
  CHECK(unverified_text({}).empty());
}

TEST_CASE("a secret is what the variable holds, of at least 16 characters, and no message shows it") {
  CHECK_FALSE(secret_in({{"TESSERA_JOB_ID", "job"}}));
  CHECK(secret_in({{"TESSERA_JOB_SECRET", kSecretOfTest}}) == kSecretOfTest);
  CHECK_THROWS_AS(secret_in({{"TESSERA_JOB_SECRET", ""}}), ValueError);
  CHECK_THROWS_WITH(secret_in({{"TESSERA_JOB_SECRET", "fifteen letters"}}),
                    ContainsSubstring("TESSERA_JOB_SECRET has 15 characters; it must have at least 16") &&
                        !ContainsSubstring("fifteen"));
}

TEST_CASE("a new secret is another one each time, and long enough") {
  const std::string one = new_job_secret(), other = new_job_secret();
  CHECK(one != other);
  CHECK(one.size() == 64);
  CHECK(one.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(secret_in({{"TESSERA_JOB_SECRET", one}}) == one);
}

}  // namespace
}  // namespace tessera
