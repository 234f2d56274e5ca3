#include "fused/cpu/rotary_kernels.h"

#include <cstring>

#include "fused/cpu/lanes.h"

namespace tessera::fused {

namespace {

template <class T>
void rotate_row(const T* x, const T* cos, const T* sin, T* out, const RotaryRows& of) {
  using Vector = typename Lanes<T>::Vector;
  const int64_t half = of.rotated / 2;
  const Vector direction(static_cast<Accumulated<T>>(of.back ? -1 : 1));
  map_elements<T, 4, 2>({x, x + half, cos, sin}, {out, out + half}, half,
                        [&](const std::array<Vector, 4>& in) -> std::array<Vector, 2> {
                          const auto& [first, second, cosine, sine] = in;
                          const auto turned = sine * direction;
                          return {first * cosine - second * turned, second * cosine + first * turned};
                        });
  std::memcpy(out + of.rotated, x + of.rotated, static_cast<size_t>(of.row_size - of.rotated) * sizeof(T));
}

template <class T>
void rotate_rows(const RotaryRows& of, int64_t begin, int64_t end) {
  int64_t index[3] = {begin / of.sizes[2] / of.sizes[1], begin / of.sizes[2] % of.sizes[1], begin % of.sizes[2]};
  for (int64_t row = begin; row < end; ++row) {
    const auto place = [&](const int64_t* strides) {
      return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
    };
    const int64_t table = place(of.table_strides);
    rotate_row(static_cast<const T*>(of.x) + place(of.x_strides), static_cast<const T*>(of.cos) + table,
               static_cast<const T*>(of.sin) + table, static_cast<T*>(of.out) + place(of.out_strides), of);
    for (int dim = 2; dim >= 0 && ++index[dim] == of.sizes[dim]; --dim) {
      index[dim] = 0;
    }
  }
}

void rotate(const RotaryRows& of, at::ScalarType dtype, int64_t begin, int64_t end) {
  with_dtype(dtype, [&]<class T>(T) { rotate_rows<T>(of, begin, end); });
}

}  // namespace

const RotaryKernels& rotary_kernels(ThisSet) {
  static constexpr RotaryKernels kernels{.rotate = rotate};
  return kernels;
}

}  // namespace tessera::fused
