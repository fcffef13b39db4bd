// How the verification kernel reads the matrices of a product, and how many programs it launches.
#pragma once

#include <cstdint>

namespace holdfast::device {

// Which elements are neighbours in memory (`c_layout` in abft/gemm/kernels_verify.py).
enum class Layout : uint8_t { rows, columns, neither };

// What groups divide, if a product has any (`groups` in abft/gemm/kernels_verify.py).
enum class Groups : uint8_t { none, rows, inner };

// A matrix as it is read: its layout and bytes of an element, 0 if there is none to be read.
struct Operand {
  Layout layout = Layout::rows;
  int64_t bytes = 0;
};

// What the kernel does for a product of A [batch, rows, inner] and B [batch, inner, columns].
struct Work {
  int64_t batch = 1, rows = 0, columns = 0, inner = 0;
  Operand c, a;  // c is not read for an encoding alone, a not if its sums are known.
  // Without C, `across` and `encode` encode A and its transpose.
  bool addend = false, encode = false, across = false;
  int64_t sum_bytes = 4;

  // Returns true if Aᵀ is read in the place of A, as its rows are contiguous.
  bool turned() const { return across && !encode && a.layout == Layout::columns; }
};

// How the rows of one matrix are divided among programs: `steps` tiles of a row make a part. Where
// columns are summed as well, a part is one tile and `steps` tiles of a column make a chunk; if the
// matrix is turned, these are rows and columns of its transpose.
struct Division {
  int32_t tile_rows = 0, tile_columns = 0, programs = 0, parts = 0, steps = 0;
};

struct Plan {
  Division c, a;
  int64_t counters = 0;
  int64_t partials = 0;  // numbers in the workspace
  int64_t programs() const { return int64_t{c.programs} + a.programs; }  // for one of the batch

  static Plan of(const Work& work);
};

// Returns the bytes that the kernel moves to and from memory. Partial sums are a few MB, written
// once and read from the cache. An addend that is the same for all rows counts as one row.
int64_t bytes_moved(const Work& work, const Plan& plan, bool addend_is_row);

}  // namespace holdfast::device
