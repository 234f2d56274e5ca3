#pragma once
// How a launcher hands the socket of a reserved port to rank 0.

namespace tessera {

/// The value is the number of the open file, a socket that listens at MASTER_PORT.
constexpr const char* kListenSocketVariable = "TESSERA_LISTEN_SOCKET";

}  // namespace tessera
