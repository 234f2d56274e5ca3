#pragma once
// Stores that ranks, and tests beside them, reach at 127.0.0.1.

#include <netinet/in.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/launch/store.h"

namespace tessera::testing {

/// A TCP socket at a port of 127.0.0.1 that is free; it is closed at the end.
class LoopbackSocket {
 public:
  LoopbackSocket();
  ~LoopbackSocket();
  LoopbackSocket(const LoopbackSocket&) = delete;
  LoopbackSocket& operator=(const LoopbackSocket&) = delete;

  void listen_without_a_word();
  /// Returns whether another one listens at that port.
  bool connect_to(int port);
  int port() const { return ntohs(address_.sin_port); }

 private:
  int file_;
  sockaddr_in address_{};
};

/// Returns a port on which no process listens now.
int free_port();

/// Which the launcher keeps for the ranks of run_processes(); the "fake" backend leaves it free.
int launchers_port();

StoreOptions store_options(int port, int rank, int world_size,
                           std::chrono::milliseconds timeout = std::chrono::seconds(20));

/// A connection of the test's own, beside those of ranks, that knows no secret. At the launcher's port unless `tcp` has
/// another.
c10::intrusive_ptr<c10d::Store> connect_beside(c10d::TCPStoreOptions tcp = {.port = 0});

/// Returns when ranks 0, which serves the store, and 1 are both here: the first to end before would be one that has
/// died, for the other.
void end_together(int rank);

}  // namespace tessera::testing
