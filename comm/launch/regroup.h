#pragma once
// Protocol by which surviving ranks regroup, over a store that their launcher serves for the whole launch. Starts are
// numbered like restart_count(). Keys:
//
//   regroup/<start>/over         the launcher  why the start is over, which ends waits for its other ranks
//   regroup/<start>/left/<rank>  the rank      why it has left its groups; it then waits for its next seat
//   regroup/<start>/next/<rank>  the launcher  the next seat: "start rank ranks"

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {

constexpr const char* kRegroupVariable = "TESSERA_REGROUP";  // "1" if the launcher serves the store for this

/// Position of a rank in a start.
struct Seat {
  int start = 0;
  int rank = 0;
  int ranks = 1;

  bool operator==(const Seat&) const = default;
};

struct RegroupStoreOptions {
  std::string address = {};
  int port = 0;
  std::optional<int> listen_socket = {};  // for the launcher, which serves the store on it and closes it
  std::string job = {};                   // see StoreOptions
  std::optional<std::string> secret = {};
};

/// Store for regrouping. Calls throw the errors of JobStore. Thread safety: any thread.
class RegroupStore {
 public:
  explicit RegroupStore(const RegroupStoreOptions& options);

  // For the launcher.
  void end_start(int start, const std::string& why);
  std::optional<std::string> find_left(int start, int rank);
  void give_seat(int start, int rank, const Seat& next);

  // For a rank.
  std::string find_over(int start);  // "" until it is over
  void leave(const Seat& seat, const std::string& why);
  Seat await_next(const Seat& left);

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace tessera
