// Which of libtorch's variables are set, and that a user's are left alone.

#include "comm/nccl_environment.h"

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

}  // namespace
}  // namespace tessera
