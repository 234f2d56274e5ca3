#include "comm/nccl/cuda_devices.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "comm/launch/store.h"

namespace tessera {

namespace {

std::string to_text(const DeviceReport& report) {
  return fmt::format("{} {} {}\n{}\n{}\n{}", report.local_rank, report.wish, static_cast<int>(report.shares),
                     report.host, fmt::join(report.devices, " "), report.reason);
}

DeviceReport from_text(const std::string& text) {
  std::istringstream lines(text);
  DeviceReport report;
  std::string devices;
  lines >> report.local_rank >> report.wish >> report.shares;
  TESSERA_CHECK(ValueError, !lines.fail(),
                "the store's entry \"{}\" reports no devices; give the ranks a store of their own", text);
  std::getline(lines, report.host);  // the rest of the first line
  std::getline(lines, report.host);
  std::getline(lines, devices);
  std::getline(lines, report.reason);
  std::istringstream words(devices);
  for (std::string device; words >> device;) {
    report.devices.push_back(device);
  }
  return report;
}

void check_all_see_some(const std::vector<DeviceReport>& reports) {
  std::vector<size_t> without;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (reports[rank].devices.empty()) {
      without.push_back(rank);
    }
  }
  if (!without.empty()) {
    throw NoDeviceError(fmt::format(
        "init_process_group: backend \"nccl\" needs a GPU for each of {} ranks; rank{} {}: {}", reports.size(),
        without.size() == 1 ? "" : "s", fmt::join(without, ", "), reports[without[0]].reason));
  }
}

int number_on_host(const std::vector<DeviceReport>& reports, size_t rank) {
  const DeviceReport& own = reports[rank];
  if (own.local_rank >= 0) {
    return own.local_rank;
  }
  return own.host.empty()
             ? 0
             : static_cast<int>(std::count_if(reports.begin(), reports.begin() + static_cast<std::ptrdiff_t>(rank),
                                              [&](const auto& r) { return r.host == own.host; }));
}

}  // namespace

std::vector<int> choose_devices(const std::vector<DeviceReport>& reports) {
  check_all_see_some(reports);
  std::vector<int> chosen;
  std::map<std::string, size_t> owners;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const DeviceReport& own = reports[rank];
    const int count = static_cast<int>(own.devices.size()), number = number_on_host(reports, rank);
    const int index = own.wish >= 0 ? own.wish : count == 1 ? 0 : own.shares ? number % count : number;
    TESSERA_CHECK(ValueError, index < count,
                  "init_process_group: backend \"nccl\": rank {} would take GPU {}, {}, but sees {}; start at most as "
                  "many ranks on a host as it has GPUs, look at CUDA_VISIBLE_DEVICES, or, in a test, set "
                  "TESSERA_SHARE_GPUS=1 for all ranks",
                  rank, index, own.wish >= 0 ? "which NcclOptions::device asks for" : "its number on its host", count);
    const auto [owner, is_new] = owners.emplace(own.devices[index], rank);
    TESSERA_CHECK(
        ValueError, is_new || (own.shares && reports[owner->second].shares),
        "init_process_group: backend \"nccl\": ranks {} and {} would share GPU {}, and NCCL needs one for each; "
        "start fewer ranks on a host, let the launcher tell LOCAL_RANK or CUDA_VISIBLE_DEVICES, or, in a test, set "
        "TESSERA_SHARE_GPUS=1 for all ranks",
        owner->second, rank, own.devices[index]);
    chosen.push_back(index);
  }
  return chosen;
}

std::vector<DeviceReport> exchange_reports(c10d::Store& store, int rank, int world_size, const DeviceReport& own) {
  std::vector<DeviceReport> reports;
  for (const std::string& text : exchange_texts(store, "devices", rank, world_size, to_text(own))) {
    reports.push_back(from_text(text));
  }
  return reports;
}

}  // namespace tessera
