#pragma once
// The key-value store through which ranks that are processes find each other.

#include <chrono>
#include <optional>
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
  /// Whose ranks meet (parse_job_identity, comm/launch/rank_environment.h); "": a job without an identity.
  std::string job = {};
  /// Secret of the job's ranks (parse_job_secret, comm/launch/job_secret.h), which tags what they store. None: no tags.
  std::optional<std::string> secret = {};
};

/// A TCPStore that rank 0 serves; returns when all ranks are connected, or on none of them. It lives to the end of the
/// process, and the same options give the same store, whatever their time-out, which is the store's from then on: a
/// rank that sets a group up anew must not meet a server that is about to close. So keys need a prefix for each use.
/// Each call of it ends at the time-out, and says so where rank 0 has ended (comm/launch/job_store.h).
///
/// Rank 0 listens on the interface that the address names, if that can be told (comm/launch/listen_socket.h). Each rank
/// is one process of one job: others that come to the address have a CommError that says which job has it, and the job
/// that has met there goes on. Jobs without an identity are told apart by their ranks alone: of two that start at once
/// ranks may mix. Where secrets differ, or some ranks have none, all have a CommError that says so. Where torchrun's
/// agent serves the store, which outlives the ranks, each attempt of a job has keys of its own. Throws CommError that
/// names address, port and, as far as it can tell, the ranks that did not come or have died. Thread safety: any number
/// of threads.
c10::intrusive_ptr<c10d::Store> connect_store(const StoreOptions& options);

/// Each rank's `text`, by rank; every rank calls it, once for a `name`. Blocks until all have, and rank 0 until the
/// others have read: its process may serve the store.
std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& name, int rank, int world_size,
                                        const std::string& text);

/// A store inside this process, for a single rank.
c10::intrusive_ptr<c10d::Store> local_store();

}  // namespace tessera
