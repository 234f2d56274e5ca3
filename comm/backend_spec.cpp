#include "comm/backend_spec.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"

namespace tessera {

namespace {

constexpr const char* kAllowed =
    "\"shm\", \"gloo\", \"threads\", \"fake\", \"nccl\", one for each device as in \"cpu:gloo,cuda:nccl\", or \"\" to "
    "choose";

bool is_for_cpu(std::string_view name) {
  constexpr std::array<std::string_view, 3> names = {"shm", "gloo", "threads"};
  return std::ranges::find(names, name) != names.end();
}

/// Parses one entry of a list, such as "cpu:gloo".
void take_part(BackendSpec& spec, std::string_view part, const std::string& backend) {
  const size_t colon = part.find(':');
  const std::string_view device = part.substr(0, colon);
  const std::string_view name = colon == std::string_view::npos ? "" : part.substr(colon + 1);
  const bool cpu = device == "cpu" && is_for_cpu(name), cuda = device == "cuda" && name == "nccl";
  TESSERA_CHECK(ValueError, cpu || cuda,
                "init_process_group: \"{}\" in backend \"{}\"; a device and its backend are needed: cpu:shm, cpu:gloo, "
                "cpu:threads or cuda:nccl",
                part, backend);
  std::string& place = cpu ? spec.cpu : spec.cuda;
  TESSERA_CHECK(ValueError, place == BackendSpec::kNone, "init_process_group: backend \"{}\" names {} twice", backend,
                device);
  place = name;
}

}  // namespace

BackendSpec parse_backend(const std::string& backend) {
  if (backend == "nccl") {
    return {.cuda = "nccl"};
  }
  if (backend == "fake" || backend == "threads") {
    return {.cpu = backend, .cuda = backend};
  }
  if (backend.empty() || is_for_cpu(backend)) {
    return {.cpu = backend};
  }
  TESSERA_CHECK(ValueError, backend.find(':') != std::string::npos,
                "init_process_group: backend \"{}\" is unknown; allowed are {}", backend, kAllowed);
  BackendSpec spec;
  std::string_view rest = backend;
  while (true) {
    const size_t comma = rest.find(',');
    take_part(spec, rest.substr(0, comma), backend);
    if (comma == std::string_view::npos) {
      break;
    }
    rest.remove_prefix(comma + 1);
  }
  return spec;
}

}  // namespace tessera
