#pragma once
// The secret of a job, by which its ranks tell each other's values in the store from those of strangers.
//
//   in the store   a record; several, one after the other, where ranks have appended
//   record         a mark, the tag, the value's length, the value
//   tag            HMAC-SHA256 of the key and the value, under HMAC-SHA256(secret, identity of the job)
//
// So a value holds for one key of one job. An older value of the same key holds, too: keys are for one use.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/launch/rank_environment.h"

namespace tessera {

/// Bytes that a store holds for a key.
using StoreValue = std::vector<uint8_t>;

/// Names the variable with the secret, equal on all ranks of a job. launch_local sets it; elsewhere, the user does.
constexpr const char* kSecretVariable = "TESSERA_JOB_SECRET";

/// Reads the secret. Without one, values have no tags. Throws ValueError for one of less than 16 characters.
std::optional<std::string> parse_job_secret(const EnvironmentLookup& lookup);

/// Returns 32 bytes of the system's random source, as 64 hexadecimal digits.
std::string new_job_secret();

/// Makes and checks tags. Thread safety: any number of threads.
class JobSecret {
 public:
  /// `job`: its identity (parse_job_identity); "" is one, too.
  JobSecret(const std::string& secret, const std::string& job);

  /// Returns a record of `value`, to be stored or appended under `key`.
  StoreValue seal(const std::string& key, const StoreValue& value) const;
  /// Returns the values of all records of `key`, one after the other; none if a tag is wrong or missing.
  std::optional<StoreValue> open(const std::string& key, const StoreValue& stored) const;

 private:
  std::array<uint8_t, 32> key_;
};

/// Returns true if it begins as a record does, which values of ranks without a secret do not.
bool is_sealed(const StoreValue& stored);

/// Returns a value's text without a check of its tag, for error messages.
std::string unverified_text(const StoreValue& stored);

}  // namespace tessera
