#pragma once
// Reports what a job's ranks are doing, from the flight records in a folder (comm/context/flight_record.h).
//
//   the others wait for rank 1
//   rank 0 waits for 5.0 s in all_gather #12 of group 'dp' (Float[64] to Float[128]) for 'blocks.1'
//   rank 1 waits for nothing, and its process is stopped; 5.1 s ago it left reduce_scatter #11 of group 'dp' ...

#include <string>

namespace tessera {

/// Returns such lines, indented, or "" if no rank waits in a collective or gave up waiting.
std::string report_flights(const std::string& folder, int ranks);

/// Folder of the ranks' flight records in one start.
class FlightFolder {
 public:
  explicit FlightFolder(std::string given);  // the user's folder; "": makes a temporary one, if possible
  ~FlightFolder();
  FlightFolder(const FlightFolder&) = delete;
  FlightFolder& operator=(const FlightFolder&) = delete;

  const std::string& path() const { return path_; }
  /// Returns the ranks' waits after a failure, and writes both to the user's folder.
  std::string report(const std::string& failure, int ranks) const;

 private:
  void remove_records() const;

  std::string path_;
  bool is_own_ = false;
};

}  // namespace tessera
