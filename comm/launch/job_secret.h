#pragma once
// Authenticates values that a job's ranks write to the store, with a secret that they share.
//
//   in the store   a record, or several if ranks have appended
//   record         a mark, the tag, the value's length, the value
//   tag            HMAC-SHA256 of key and value, under HMAC-SHA256(secret, identity of the job)
//
// A value is thus valid for one key of one job. An older value of the same key is valid too: use each key once.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch/rank_environment.h"

namespace tessera {

using StoreValue = std::vector<uint8_t>;  // a store's value of a key

constexpr const char* kSecretVariable = "TESSERA_JOB_SECRET";  // set by launch_local or the user, equal on all ranks

std::optional<std::string> parse_job_secret(const EnvironmentLookup& lookup);  // ValueError if under 16 characters

std::string new_job_secret();  // 32 random bytes of the system as 64 hexadecimal digits

class JobSecret {  // makes and checks tags; thread-safe
 public:
  JobSecret(const std::string& secret, const std::string& job);  // `job`: parse_job_identity(), which may be ""

  StoreValue seal(const std::string& key, const StoreValue& value) const;  // makes a record to store or append
  /// Returns the concatenated values of all records of `key`, or none if a tag is wrong or missing.
  std::optional<StoreValue> open(const std::string& key, const StoreValue& stored) const;

 private:
  std::array<uint8_t, 32> key_;
};

bool is_sealed(const StoreValue& stored);  // whether it begins with a record's mark

std::string unverified_text(const StoreValue& stored);  // value without a check of its tag, for error messages

}  // namespace tessera
