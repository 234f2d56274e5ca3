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
  std::string job = {};                    // identity (comm/launch/rank_environment.h); may be ""
  std::optional<std::string> secret = {};  // shared by the ranks (comm/launch/job_secret.h); none: no tags
};

/// Returns a TCPStore of rank 0, or of its launcher, once all ranks are connected, or throws on all of them. Its calls
/// end at the timeout (comm/launch/job_store.h). Throws CommError that names address, port and, if known, ranks that
/// are absent or have died, another job at the address, or differing secrets. The store lives until the process ends,
/// and is returned again for the same address, port and ranks: use a key prefix for each use. docs/semantics.md has
/// details. Thread-safe.
c10::intrusive_ptr<c10d::Store> connect_store(const StoreOptions& options);

/// Closes the connections that connect_store() keeps, unless they are in use, before the process meets other ranks
/// again.
void forget_stores();

/// Returns each rank's `text`. All ranks must call it, once per `name`. Blocks until all have, and on rank 0, which may
/// serve the store, until the others have read. Throws CommError within a second if a rank of this host that has met
/// the others over `store` dies.
std::vector<std::string> exchange_texts(c10d::Store& store, const std::string& name, int rank, int world_size,
                                        const std::string& text);

c10::intrusive_ptr<c10d::Store> local_store();  // a store in this process, for a single rank

}  // namespace tessera
