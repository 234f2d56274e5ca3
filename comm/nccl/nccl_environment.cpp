#include "comm/nccl/nccl_environment.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

#include "comm/launch/host_process.h"

namespace tessera {

namespace {

bool is_set(const char* name) {
  return std::getenv(name) != nullptr;
}

void set_default(const char* name, const std::string& value) {
  setenv(name, value.c_str(), /*overwrite=*/0);
}

/// Keeps a user's host name, but not one inherited from the process that started this one.
void be_a_host_of_its_own() {
  constexpr const char* kName = "NCCL_HOSTID";
  constexpr std::string_view kPrefix = "tessera process ";
  const char* const given = std::getenv(kName);
  if (given != nullptr && !std::string_view(given).starts_with(kPrefix)) {
    return;
  }
  const HostProcess process = this_process();
  setenv(kName, fmt::format("{}{} of {}", kPrefix, process.pid, process.host).c_str(), /*overwrite=*/1);
}

}  // namespace

bool shares_gpus() {
  const char* const value = std::getenv("TESSERA_SHARE_GPUS");
  return value != nullptr && std::string_view(value) == "1";
}

void set_nccl_environment(const std::string& flight_record_prefix) {
  if (!is_set("TORCH_NCCL_ASYNC_ERROR_HANDLING") && !is_set("NCCL_ASYNC_ERROR_HANDLING")) {
    constexpr const char* kAbortOnly = "2";
    set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", kAbortOnly);
    // Otherwise libtorch's monitor ends the process minutes after the first timeout, although everything was aborted.
    set_default("TORCH_NCCL_ENABLE_MONITORING", "0");
  }
  set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1");
  set_default("TORCH_FR_BUFFER_SIZE", "2000");
  if (!flight_record_prefix.empty()) {
    set_default("TORCH_FR_DUMP_TEMP_FILE", flight_record_prefix);
  }
  if (shares_gpus()) {
    be_a_host_of_its_own();
  }
}

}  // namespace tessera
