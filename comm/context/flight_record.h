#pragma once
// Flight record: a rank's latest communication, for metrics, for traces, and for diagnosis after failures.
//
//   for (const FlightGroup& group : FlightRecord::of_rank()->groups()) {
//     fmt::print("{}: {} calls, {} bytes sent, waited {} ns\n", group.name, group.calls, group.bytes_sent,
//                group.waited_ns);
//   }
//
// It records every collective and message of comm/collectives.h on every backend, except in groups of one rank, which
// send nothing. A ring keeps the last kFlightCapacity calls. keep_in() moves it to a file that outlives the process.

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/context/collective.h"

namespace tessera {

enum class FlightState : uint8_t { Issued, Waiting, Done, Failed };

/// Call, in the format that files use too. Times are nanoseconds since 1970, or 0 for events that have not happened.
struct FlightEntry {
  uint64_t number = 0;        // among the rank's calls, from 1
  uint64_t group_number = 0;  // among its collectives in the group, from 1; 0 for messages
  int64_t input_numel = -1;   // -1: none
  int64_t output_numel = -1;
  int64_t bytes_sent = 0;  // counted like CommStats
  int64_t issued_ns = 0;
  int64_t waited_ns = 0;  // when wait() was called
  int64_t ended_ns = 0;   // when it returned
  uint32_t group = 0;     // index in groups()
  int32_t peer = -1;      // source of a broadcast, or the other rank of a message
  Collective kind = Collective::Barrier;
  FlightState state = FlightState::Issued;
  int8_t dtype = -1;                // at::ScalarType
  int8_t op = -1;                   // ReduceOp
  std::array<char, 60> label = {};  // FlightLabel, truncated, null-terminated
};
static_assert(sizeof(FlightEntry) == 136);

constexpr size_t kFlightCapacity = 1024;

/// Process group, and this rank's communication in it.
struct FlightGroup {
  std::string name;  // such as "dp"
  std::string key;   // equal on the group's ranks, and unique to the group
  int rank = 0;      // of the caller in the group
  int size = 0;
  int64_t calls = 0;
  int64_t bytes_sent = 0;
  int64_t waited_ns = 0;  // in wait(), except in threads with an UnobservedScope
};

/// Variable with the folder for the records of a job's ranks. A local launcher sets it if it is not set.
inline constexpr const char* kFlightVariable = "TESSERA_FLIGHT_DIR";

/// Returns "folder/rank-3.flight".
std::string flight_path(const std::string& folder, int rank);

/// Contents of a file, whose process may have ended or may still be writing it.
struct FlightFile {
  int rank = 0;
  int64_t pid = 0;
  std::vector<FlightEntry> entries = {};        // oldest first
  std::map<uint32_t, FlightGroup> groups = {};  // the latest, by FlightEntry::group; without sums
};

/// Calls of one rank. Thread safety: any thread.
class FlightRecord {
 public:
  using Observer = std::function<void(const FlightEntry& ended)>;

  /// Returns the record of the calling thread's rank.
  static std::shared_ptr<FlightRecord> of_rank();

  FlightRecord();
  ~FlightRecord();
  FlightRecord(const FlightRecord&) = delete;
  FlightRecord& operator=(const FlightRecord&) = delete;

  uint32_t add_group(FlightGroup group);
  /// Records a call and fills number, group_number, issued_ns, state and label. Returns the number.
  uint64_t issue(const FlightEntry& call);
  void wait_begins(uint64_t number);
  void ends(uint64_t number, FlightState state);

  std::vector<FlightEntry> entries() const;  // oldest first
  std::vector<FlightGroup> groups() const;

  /// Calls `observer` for each call that ends, in the thread that waited. An empty function removes the observer.
  void set_observer(Observer observer);

  /// Moves the record into a new file, replacing any existing one. Throws Error if it cannot be written.
  void keep_in(const std::string& path, int rank, int world_size);
  /// Returns nullopt for a file that is not a record of this version.
  static std::optional<FlightFile> read(const std::string& path);

 private:
  struct Memory;
  struct Counted {
    FlightGroup group;
    uint64_t collectives = 0;
  };
  FlightEntry* find(uint64_t number);
  void release();

  mutable std::mutex mutex_;
  Memory* memory_;
  bool is_mapped_ = false;  // whether memory_ is in a file
  std::vector<Counted> groups_;
  std::shared_ptr<const Observer> observer_;
};

/// Call in flight, held by its Pending; empty for a call that is not recorded. Thread safety: like Pending.
struct FlightCall {
  std::shared_ptr<FlightRecord> record = {};
  uint64_t number = 0;

  void wait_begins() const;
  void ends(FlightState state) const;
};

/// Names the purpose of the calling thread's communication, such as a unit of fully_shard. Scopes nest; the innermost
/// one applies. `label` must outlive the scope. Thread safety: affects its own thread only.
class FlightLabel {
 public:
  explicit FlightLabel(std::string_view label);
  ~FlightLabel();
  FlightLabel(const FlightLabel&) = delete;
  FlightLabel& operator=(const FlightLabel&) = delete;

 private:
  std::string_view previous_;
};

}  // namespace tessera
