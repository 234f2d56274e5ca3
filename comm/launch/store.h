#pragma once
// The key-value store through which ranks that are processes find each other.

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera {

struct StoreOptions {
  std::string address = {};
  int port = 0;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{0};
};

/// A TCPStore that rank 0 serves; returns when all ranks are connected, or on none of them. It lives to the end of the
/// process, and the same options give the same store, whatever their time-out, which is the store's from then on: a
/// rank that sets a group up anew must not meet a server that is about to close. So keys need a prefix for each use.
///
/// Each rank is one process: those of another job that comes to the address have a CommError, and the job that has met
/// there goes on. Where torchrun's agent serves the store, which outlives the ranks, each attempt of a job has keys of
/// its own. Throws CommError that names address, port and, as far as it can tell, the ranks that did not come. Thread
/// safety: any number of threads.
c10::intrusive_ptr<c10d::Store> connect_store(const StoreOptions& options);

/// Each rank's `text`, by rank; every rank calls it, once for a `name`. Blocks until all have, and rank 0 until the
/// others have read: its process may serve the store.
std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& name, int rank, int world_size,
                                        const std::string& text);

/// A store inside this process, for a single rank.
c10::intrusive_ptr<c10d::Store> local_store();

}  // namespace tessera
