#include "comm/launch/regroup.h"

#include <fmt/format.h>

#include <sstream>

#include "base/error.h"
#include "comm/launch/job_secret.h"
#include "comm/launch/job_store.h"

namespace tessera {

namespace {

/// Timeout of a call; the launcher is on this host, and always answers.
constexpr std::chrono::minutes kCallTimeout(5);

std::string over_key(int start) {
  return fmt::format("regroup/{}/over", start);
}

std::string left_key(int start, int rank) {
  return fmt::format("regroup/{}/left/{}", start, rank);
}

std::string next_key(int start, int rank) {
  return fmt::format("regroup/{}/next/{}", start, rank);
}

Seat parse_seat(const std::string& text) {
  std::istringstream fields(text);
  Seat seat;
  fields >> seat.start >> seat.rank >> seat.ranks;
  TESSERA_ASSERT(!fields.fail(), "\"{}\" is no seat", text);
  return seat;
}

}  // namespace

RegroupStore::RegroupStore(const RegroupStoreOptions& options) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(options.port);
  tcp.isServer = options.listen_socket.has_value();
  tcp.masterListenFd = options.listen_socket;
  tcp.timeout = kCallTimeout;
  std::optional<JobSecret> secret;
  if (options.secret) {
    secret.emplace(*options.secret, options.job);
  }
  store_ = c10::make_intrusive<JobStore>(options.address, tcp, "the launcher", secret);
}

void RegroupStore::end_start(int start, const std::string& why) {
  store_->set(over_key(start), why);
}

std::optional<std::string> RegroupStore::find_left(int start, int rank) {
  const std::string key = left_key(start, rank);
  return store_->check({key}) ? std::optional(store_->get_to_str(key)) : std::nullopt;
}

void RegroupStore::give_seat(int start, int rank, const Seat& next) {
  store_->set(next_key(start, rank), fmt::format("{} {} {}", next.start, next.rank, next.ranks));
}

std::string RegroupStore::find_over(int start) {
  const std::string key = over_key(start);
  return store_->check({key}) ? store_->get_to_str(key) : "";
}

void RegroupStore::leave(const Seat& seat, const std::string& why) {
  store_->set(left_key(seat.start, seat.rank), why);
}

Seat RegroupStore::await_next(const Seat& left) {
  const std::string key = next_key(left.start, left.rank);
  wait_for_keys(*store_, {key}, c10d::Store::kNoTimeout, [] {});  // ends with the launcher
  return parse_seat(store_->get_to_str(key));
}

}  // namespace tessera
