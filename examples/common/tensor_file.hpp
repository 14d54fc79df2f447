// Files of tensors, in the format of ExecuTorch's tests of MLX operations.
//
// A file begins with the number of tensors (u32). Each tensor has its dtype
// (u32: 0 f32, 1 f16, 2 i32, 3 i64, 4 bf16, 5 bool, 6 u8), its rank (u32), the
// size of each dimension (i32), and its elements, row-major.
//
// Everything is little endian. A number is a tensor of rank 0.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include "etkv/etkv.hpp"

namespace etkv::examples {

/// A tensor in a file.
struct FileTensor {
  executorch::aten::ScalarType type = executorch::aten::ScalarType::Float;
  std::vector<executorch::aten::SizesType> sizes;
  /// The elements. A tensor without elements has one unused byte, because
  /// programs accept no null pointer.
  std::vector<std::byte> data;
};

/// Reads every tensor of a file. Refuses a file that is shorter or longer than
/// its tensors, other dtypes, more than 16 dimensions, negative sizes, and
/// bools other than 0 and 1.
Result<std::vector<FileTensor>> read_tensors(const std::string& path);

/// Writes the outputs of a method. An integer becomes i64, a bool becomes bool
/// and a float becomes f32, each of rank 0. Refuses other types before it
/// creates the file.
Result<void> write_tensors(
    const std::string& path,
    const std::vector<executorch::runtime::EValue>& outputs);

/// Returns a dtype and sizes as text: "f32 [2, 16, 64]".
std::string tensor_text(
    executorch::aten::ScalarType type,
    executorch::aten::ArrayRef<executorch::aten::SizesType> sizes);

/// Returns the dtype and sizes of an output as text, as tensor_text does.
std::string output_text(const executorch::runtime::EValue& output);

} // namespace etkv::examples
