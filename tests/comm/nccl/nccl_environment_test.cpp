// Which of libtorch's variables are set, and that a user's are left alone.

#include "comm/nccl/nccl_environment.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include "third_party/catch2/catch.h"

namespace tessera {
namespace {

constexpr std::array<const char*, 6> kNames = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",      "TORCH_FR_BUFFER_SIZE",      "TORCH_FR_DUMP_TEMP_FILE"};

void clear() {
  for (const char* name : kNames) {
    unsetenv(name);
  }
}

std::string value_of(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "not set" : value;
}

TEST_CASE("time-outs over NCCL leave the process alive unless the user says how they are handled") {
  clear();
  set_nccl_environment("");
  CHECK(value_of("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "2");
  CHECK(value_of("TORCH_NCCL_ENABLE_MONITORING") == "0");
  CHECK(value_of("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1");
  CHECK(value_of("TORCH_FR_BUFFER_SIZE") == "2000");
  CHECK(value_of("TORCH_FR_DUMP_TEMP_FILE") == "not set");
  set_nccl_environment("/tmp/hang_");
  CHECK(value_of("TORCH_NCCL_ENABLE_MONITORING") == "0");
  CHECK(value_of("TORCH_FR_DUMP_TEMP_FILE") == "/tmp/hang_");

  for (const char* name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}) {
    CAPTURE(name);
    clear();
    setenv(name, "3", /*overwrite=*/1);
    set_nccl_environment("");
    CHECK(value_of(name) == "3");
    CHECK(value_of("TORCH_NCCL_ENABLE_MONITORING") == "not set");
  }
  CHECK(value_of("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "not set");
  clear();
}

TEST_CASE("ranks that share GPUs are hosts of their own for NCCL, unless the user names them") {
  unsetenv("NCCL_HOSTID");
  unsetenv("TESSERA_SHARE_GPUS");
  CHECK_FALSE(shares_gpus());
  set_nccl_environment("");
  CHECK(value_of("NCCL_HOSTID") == "not set");
  setenv("TESSERA_SHARE_GPUS", "1", /*overwrite=*/1);
  CHECK(shares_gpus());
  set_nccl_environment("");
  const std::string own = value_of("NCCL_HOSTID");
  CHECK_THAT(own, Catch::Matchers::ContainsSubstring(std::to_string(getpid())));
  setenv("NCCL_HOSTID", "tessera process 1 of the one that started this", /*overwrite=*/1);
  set_nccl_environment("");
  CHECK(value_of("NCCL_HOSTID") == own);
  setenv("NCCL_HOSTID", "the user's", /*overwrite=*/1);
  set_nccl_environment("");
  CHECK(value_of("NCCL_HOSTID") == "the user's");
  unsetenv("NCCL_HOSTID");
  unsetenv("TESSERA_SHARE_GPUS");
  clear();
}

}  // namespace
}  // namespace tessera
