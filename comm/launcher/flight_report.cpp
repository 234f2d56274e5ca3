#include "comm/launcher/flight_report.h"

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>
#include <vector>

#include "comm/context/flight_record.h"

namespace tessera {

namespace {

double seconds_since(int64_t ns) {
  const auto now = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  return std::max(0.0, static_cast<double>(now - ns) * 1e-9);
}

/// Returns "Float[64] to Float[128]", "Float[64]", or "".
std::string describe_sizes(const FlightEntry& call) {
  std::string text;
  for (const int64_t numel : {call.input_numel, call.output_numel}) {
    if (numel >= 0 && (text.empty() || call.input_numel != call.output_numel)) {
      text += fmt::format("{}{}[{}]", text.empty() ? "" : " to ",
                          c10::toString(static_cast<c10::ScalarType>(call.dtype)), numel);
    }
  }
  return text;
}

std::string describe_call(const FlightEntry& call, const FlightFile& file) {
  const auto group = file.groups.find(call.group);
  std::string text = fmt::format("{} ", name(call.kind));
  text += call.group_number > 0 ? fmt::format("#{}", call.group_number) : fmt::format("with peer {}", call.peer);
  text += fmt::format(" of group '{}'", group == file.groups.end() ? "?" : group->second.name);
  if (const auto sizes = describe_sizes(call); !sizes.empty()) {
    text += fmt::format(" ({})", sizes);
  }
  return call.label[0] != '\0' ? text + fmt::format(" for '{}'", call.label.data()) : text;
}

/// Returns the call that ended last, or null.
const FlightEntry* find_last_ended(const FlightFile& file) {
  const FlightEntry* last = nullptr;
  for (const auto& call : file.entries) {
    last = call.ended_ns > (last ? last->ended_ns : 0) ? &call : last;
  }
  return last;
}

/// Returns the call in which a rank waits, or that it gave up last; null if its last call succeeded.
const FlightEntry* find_stuck(const FlightFile& file) {
  for (const auto& call : file.entries) {
    if (call.state == FlightState::Waiting) {
      return &call;
    }
  }
  const auto* const last = find_last_ended(file);
  return last && last->state == FlightState::Failed ? last : nullptr;
}

/// Describes a process of this host, such as ", its process is stopped"; "" if it runs.
std::string describe_process(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  const auto end = text.rfind(')');  // end of the program's name
  const char state = end != std::string::npos && end + 2 < text.size() ? text[end + 2] : 'X';
  return state == 'T'                   ? ", and its process is stopped"
         : state == 'X' || state == 'Z' ? ", and its process has ended"
                                        : "";
}

std::string describe_rank(int rank, const std::optional<FlightFile>& file) {
  if (!file) {
    return fmt::format("rank {} has no record: it has not come to init_process_group()", rank);
  }
  const auto process = describe_process(file->pid);
  if (const auto* const stuck = find_stuck(*file)) {
    const auto call = describe_call(*stuck, *file);
    return stuck->state == FlightState::Waiting
               ? fmt::format("rank {} waits for {:.1f} s in {}{}", rank, seconds_since(stuck->waited_ns), call, process)
               : fmt::format("rank {} gave up {}{}", rank, call, process);
  }
  const auto* const last = find_last_ended(*file);
  const auto before =
      last ? fmt::format("{:.1f} s ago it left {}", seconds_since(last->ended_ns), describe_call(*last, *file))
           : std::string("it has left no collective");
  return fmt::format("rank {} waits for nothing{}; {}", rank, process, before);
}

}  // namespace

std::string report_flights(const std::string& folder, int ranks) {
  std::string lines;
  std::vector<int> others;  // ranks that wait for nothing
  for (int rank = 0; rank < ranks; ++rank) {
    const auto file = FlightRecord::read(flight_path(folder, rank));
    lines += fmt::format("  {}\n", describe_rank(rank, file));
    if (!file || !find_stuck(*file)) {
      others.push_back(rank);
    }
  }
  if (static_cast<int>(others.size()) == ranks) {
    return "";
  }
  return others.size() == 1 ? fmt::format("  the others wait for rank {}\n{}", others[0], lines) : lines;
}

FlightFolder::FlightFolder(std::string given) : path_(std::move(given)) {
  if (path_.empty()) {
    const char* const temporary = std::getenv("TMPDIR");
    path_ = fmt::format("{}/tessera-flight-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    is_own_ = mkdtemp(path_.data()) != nullptr;
    path_ = is_own_ ? path_ : "";
  }
  if (!path_.empty()) {
    remove_records();  // from an earlier start, which may have had more ranks
  }
}

FlightFolder::~FlightFolder() {
  std::error_code ignored;
  if (is_own_) {
    std::filesystem::remove_all(path_, ignored);
  }
}

std::string FlightFolder::report(const std::string& failure, int ranks) const {
  const auto text = path_.empty() ? "" : report_flights(path_, ranks);
  if (!path_.empty() && !is_own_) {
    std::ofstream(path_ + "/launcher.txt") << failure << '\n' << text;
  }
  return text.empty() || is_own_ ? text : fmt::format("{}  tools/doctor {} says more\n", text, path_);
}

void FlightFolder::remove_records() const {
  std::error_code ignored;
  std::filesystem::remove(path_ + "/launcher.txt", ignored);
  for (int rank = 0; std::filesystem::remove(flight_path(path_, rank), ignored); ++rank) {
  }
}

}  // namespace tessera
