#include "comm/context/flight_record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/error.h"
#include "base/open_files.h"
#include "comm/context/rank_state.h"

namespace tessera {

namespace {

constexpr size_t kGroupCapacity = 64;

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Copies a string, truncated to fit and null-terminated.
template <size_t size>
void copy_text(std::array<char, size>& to, std::string_view text) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to.data(), text.data(), length);
  to[length] = '\0';
}

std::string_view& current_label() {
  static thread_local std::string_view label;
  return label;
}

bool is_message(Collective kind) {
  return kind == Collective::Send || kind == Collective::Recv;
}

/// Group in a file, which keeps the last kGroupCapacity.
struct GroupText {
  uint64_t index = 0;
  int32_t rank = 0;
  int32_t size = 0;
  std::array<char, 32> name = {};
  std::array<char, 208> key = {};
};
static_assert(sizeof(GroupText) == 256);

}  // namespace

/// Memory layout, which tools/doctor reads too.
struct FlightRecord::Memory {
  std::array<char, 8> magic = {'T', 'S', 'F', 'L', 'I', 'G', 'H', 'T'};
  uint32_t version = 1;
  uint32_t entry_bytes = sizeof(FlightEntry);
  uint32_t capacity = kFlightCapacity;
  uint32_t group_capacity = kGroupCapacity;
  int32_t rank = -1;
  int32_t world_size = -1;
  int64_t pid = getpid();
  std::array<char, 64> host = {};
  uint64_t calls = 0;
  uint64_t groups = 0;
  std::array<GroupText, kGroupCapacity> group_texts = {};
  std::array<FlightEntry, kFlightCapacity> entries = {};
};

FlightRecord::FlightRecord() : memory_(new Memory) {}

FlightRecord::~FlightRecord() {
  release();
}

void FlightRecord::release() {
  if (is_mapped_) {
    munmap(memory_, sizeof(Memory));
  } else {
    delete memory_;
  }
}

std::shared_ptr<FlightRecord> FlightRecord::of_rank() {
  return detail::rank_state().flight_record;
}

uint32_t FlightRecord::add_group(FlightGroup group) {
  const std::lock_guard lock(mutex_);
  const size_t index = groups_.size();
  auto& text = memory_->group_texts[index % kGroupCapacity];
  text = {.index = index, .rank = group.rank, .size = group.size};
  copy_text(text.name, group.name);
  copy_text(text.key, group.key);
  groups_.push_back({.group = std::move(group)});
  memory_->groups = groups_.size();
  return static_cast<uint32_t>(index);
}

FlightEntry* FlightRecord::find(uint64_t number) {
  FlightEntry& entry = memory_->entries[number % kFlightCapacity];
  return entry.number == number ? &entry : nullptr;  // null: the ring has overwritten it
}

uint64_t FlightRecord::issue(const FlightEntry& call) {
  const std::lock_guard lock(mutex_);
  Counted& counted = groups_[call.group];
  ++counted.group.calls;
  counted.group.bytes_sent += call.bytes_sent;
  const uint64_t number = memory_->calls + 1;
  FlightEntry& entry = memory_->entries[number % kFlightCapacity];
  entry = call;
  entry.number = number;
  entry.group_number = is_message(call.kind) ? 0 : ++counted.collectives;
  entry.issued_ns = now_ns();
  copy_text(entry.label, current_label());
  memory_->calls = number;
  return number;
}

void FlightRecord::wait_begins(uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (FlightEntry* const entry = find(number)) {
    entry->state = FlightState::Waiting;
    entry->waited_ns = now_ns();
  }
}

void FlightRecord::ends(uint64_t number, FlightState state) {
  std::shared_ptr<const Observer> observer;
  FlightEntry ended;
  {
    const std::lock_guard lock(mutex_);
    FlightEntry* const entry = find(number);
    if (!entry) {
      return;
    }
    entry->state = state;
    entry->ended_ns = now_ns();
    if (entry->waited_ns > 0 && !detail::is_unobserved) {
      groups_[entry->group].group.waited_ns += entry->ended_ns - entry->waited_ns;
    }
    if (!observer_) {
      return;
    }
    observer = observer_;
    ended = *entry;
  }
  (*observer)(ended);
}

std::vector<FlightEntry> FlightRecord::entries() const {
  const std::lock_guard lock(mutex_);
  const uint64_t last = memory_->calls;
  std::vector<FlightEntry> result;
  for (uint64_t number = last > kFlightCapacity ? last - kFlightCapacity + 1 : 1; number <= last; ++number) {
    result.push_back(memory_->entries[number % kFlightCapacity]);
  }
  return result;
}

std::vector<FlightGroup> FlightRecord::groups() const {
  const std::lock_guard lock(mutex_);
  std::vector<FlightGroup> result;
  for (const Counted& counted : groups_) {
    result.push_back(counted.group);
  }
  return result;
}

void FlightRecord::set_observer(Observer observer) {
  const std::lock_guard lock(mutex_);
  observer_ = observer ? std::make_shared<const Observer>(std::move(observer)) : nullptr;
}

void FlightRecord::keep_in(const std::string& path, int rank, int world_size) {
  const auto fail = [&](int error) {
    throw Error(fmt::format("the flight record of rank {}: {}: {}", rank, path, std::strerror(error)));
  };
  unlink(path.c_str());  // instead of truncating it under a record that maps it
  const int file = above_standard(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (file < 0) {
    fail(errno);
  }
  // Writing to memory of a file for which the disk has no room would kill the process.
  const int refused = posix_fallocate(file, 0, sizeof(Memory));
  void* const mapped =
      refused == 0 ? mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
  const int error = refused != 0 ? refused : errno;
  close(file);
  if (mapped == MAP_FAILED) {
    fail(error);
  }
  const std::lock_guard lock(mutex_);
  auto* const moved = new (mapped) Memory(*memory_);
  release();
  memory_ = moved;
  is_mapped_ = true;
  memory_->rank = rank;
  memory_->world_size = world_size;
  gethostname(memory_->host.data(), memory_->host.size() - 1);
}

std::string flight_path(const std::string& folder, int rank) {
  return fmt::format("{}/rank-{}.flight", folder, rank);
}

std::optional<FlightFile> FlightRecord::read(const std::string& path) {
  const auto memory = std::make_unique<Memory>();
  const auto expected_magic = memory->magic;
  const auto expected_version = memory->version;
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(memory.get()), sizeof(Memory));
  if (file.gcount() != sizeof(Memory) || memory->magic != expected_magic || memory->version != expected_version) {
    return std::nullopt;
  }
  FlightFile result{.rank = memory->rank, .pid = memory->pid};
  for (const FlightEntry& entry : memory->entries) {
    if (entry.number > 0) {
      result.entries.push_back(entry);
      result.entries.back().label.back() = '\0';
    }
  }
  std::ranges::sort(result.entries, {}, &FlightEntry::number);
  for (size_t slot = 0; slot < std::min<size_t>(memory->groups, kGroupCapacity); ++slot) {
    GroupText& text = memory->group_texts[slot];
    text.name.back() = text.key.back() = '\0';
    result.groups[static_cast<uint32_t>(text.index)] = {
        .name = text.name.data(), .key = text.key.data(), .rank = text.rank, .size = text.size};
  }
  return result;
}

void FlightCall::wait_begins() const {
  if (record) {
    record->wait_begins(number);
  }
}

void FlightCall::ends(FlightState state) const {
  if (record) {
    record->ends(number, state);
  }
}

FlightLabel::FlightLabel(std::string_view label) : previous_(std::exchange(current_label(), label)) {}

FlightLabel::~FlightLabel() {
  current_label() = previous_;
}

}  // namespace tessera
