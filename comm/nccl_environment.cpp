#include "comm/nccl_environment.h"

#include <cstdlib>

namespace tessera {

namespace {

bool is_set(const char* name) {
  return std::getenv(name) != nullptr;
}

void set_default(const char* name, const std::string& value) {
  setenv(name, value.c_str(), /*overwrite=*/0);
}

}  // namespace

void set_nccl_environment(const std::string& flight_record_prefix) {
  if (!is_set("TORCH_NCCL_ASYNC_ERROR_HANDLING") && !is_set("NCCL_ASYNC_ERROR_HANDLING")) {
    constexpr const char* kAbortOnly = "2";
    set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", kAbortOnly);
    // Else libtorch's monitor ends the process some minutes after the first time-out, though all was aborted.
    set_default("TORCH_NCCL_ENABLE_MONITORING", "0");
  }
  set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1");
  set_default("TORCH_FR_BUFFER_SIZE", "2000");
  if (!flight_record_prefix.empty()) {
    set_default("TORCH_FR_DUMP_TEMP_FILE", flight_record_prefix);
  }
}

}  // namespace tessera
