#include "comm/backend/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tessera {

#ifdef __SSE2__

void stream_copy(void* to, const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const size_t misaligned = reinterpret_cast<uintptr_t>(target) % kLine;
  const size_t head = std::min(misaligned == 0 ? 0 : kLine - misaligned, bytes);
  std::memcpy(target, source, head);
  target += head;
  source += head;
  size_t rest = bytes - head;
  for (; rest >= kLine; rest -= kLine, target += kLine, source += kLine) {
    __m128i line[4];
    for (int i = 0; i < 4; ++i) {
      line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source) + i);
    }
    for (int i = 0; i < 4; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target) + i, line[i]);
    }
  }
  std::memcpy(target, source, rest);
  _mm_sfence();  // an ordinary store may then publish the copy to other threads
}

#else

void stream_copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

#endif

void copy_bytes(char* to, const char* from, int64_t bytes, int64_t stream_from) {
  if (bytes == 0 || to == from) {
    return;
  }
  if (bytes >= stream_from) {
    stream_copy(to, from, static_cast<size_t>(bytes));
  } else {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  }
}

}  // namespace tessera
