#pragma once
// Rows that a rotation reads and writes, in the order of memory, for the kernels of the CPU and of the GPU.

#include <cstdint>

namespace tessera::fused {

/// Rows of `row_size` elements, of which the first `rotated` turn, in three dims with strides in elements. Tables have
/// rows of `rotated` elements, and the stride 0 in dims that they lack.
struct RotaryRows {
  const void* x;
  const void* cos;
  const void* sin;
  void* out;
  bool back;  // by the negative angle
  int64_t row_size, rotated;
  int64_t sizes[3];
  int64_t x_strides[3], out_strides[3], table_strides[3];

  int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
};

/// Returns those of tensors [batch, heads, length, features] (a Tensor of ATen) with contiguous rows and tables.
template <class Tensor>
RotaryRows rotary_rows(const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor& out, bool back) {
  const int64_t rotated = cos.size(-1), of_batch = cos.dim() == 4 ? cos.size(2) * rotated : 0;
  RotaryRows rows{.x = x.const_data_ptr(),
                  .cos = cos.const_data_ptr(),
                  .sin = sin.const_data_ptr(),
                  .out = out.mutable_data_ptr(),
                  .back = back,
                  .row_size = x.size(3),
                  .rotated = rotated,
                  .sizes = {x.size(0), x.size(1), x.size(2)},
                  .x_strides = {x.stride(0), x.stride(1), x.stride(2)},
                  .out_strides = {out.stride(0), out.stride(1), out.stride(2)},
                  .table_strides = {of_batch, 0, rotated}};
  if (x.stride(1) < x.stride(2)) {  // heads lie side by side, as projections write them
    for (int64_t* values : {rows.sizes, rows.x_strides, rows.out_strides, rows.table_strides}) {
      const int64_t of_heads = values[1];
      values[1] = values[2];
      values[2] = of_heads;
    }
  }
  return rows;
}

}  // namespace tessera::fused
