#pragma once
// What a process has to see to itself when it opens and grows files. Thread safety: any thread.

#include <cstdint>
#include <string>

namespace tessera {

/// The open file `descriptor`, or -1, under a number that is none of stdin, stdout and stderr: where those are closed,
/// what the program prints would go to the file. Closes the number that it had. -1, with errno, on failure.
int above_standard(int descriptor);

/// Why a file of this process may not have `bytes`; "" where it may. What is past the limit (ulimit -f) would end the
/// process by a signal.
std::string past_size_limit(uint64_t bytes);

}  // namespace tessera
