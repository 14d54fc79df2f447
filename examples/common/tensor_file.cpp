#include "examples/common/tensor_file.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <system_error>
#include <utility>

#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>

#include "examples/common/arguments.hpp"
#include "examples/common/format.hpp"
#include "examples/common/try.hpp"

namespace etkv::examples {
namespace {

using executorch::aten::ArrayRef;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::runtime::EValue;

struct Dtype {
  ScalarType type;
  const char* name;
  size_t bytes;
};

/// The dtypes. The index of a dtype is its number in a file.
constexpr std::array<Dtype, 7> kDtypes = {{
    {ScalarType::Float, "f32", 4},
    {ScalarType::Half, "f16", 2},
    {ScalarType::Int, "i32", 4},
    {ScalarType::Long, "i64", 8},
    {ScalarType::BFloat16, "bf16", 2},
    {ScalarType::Bool, "bool", 1},
    {ScalarType::Byte, "u8", 1},
}};

/// The maximum number of dimensions of a tensor in ExecuTorch.
constexpr uint32_t kMaxDimensions = 16;

const Dtype* find_dtype(ScalarType type) {
  const auto found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& dtype) {
        return dtype.type == type;
      });
  return found == kDtypes.end() ? nullptr : &*found;
}

/// Reads a file sequentially.
class Reader {
 public:
  static Result<Reader> open(const std::string& path) {
    std::error_code code;
    if (!std::filesystem::is_regular_file(path, code)) {
      return refuse("there is no file of tensors at " + path);
    }
    Reader reader(path);
    reader.left_ = std::filesystem::file_size(path, code);
    if (code || !reader.file_) {
      return refuse("cannot read the tensors " + path);
    }
    return reader;
  }

  /// Fills `to` with the next `n` bytes. `what` names them in errors.
  Result<void> take(void* to, uint64_t n, const std::string& what) {
    if (n > left_) {
      return refuse(
          path_ + " is truncated: " + what + " takes " +
          counted(static_cast<int64_t>(n), "byte") + ", " +
          std::to_string(left_) + " are left");
    }
    if (!file_.read(static_cast<char*>(to), static_cast<std::streamsize>(n))) {
      return refuse("cannot read the tensors " + path_);
    }
    left_ -= n;
    return {};
  }

  Result<uint32_t> number(const std::string& what) {
    uint32_t value = 0;
    RETURN_IF_ERROR(take(&value, sizeof(value), what));
    return value;
  }

  Result<FileTensor> tensor(const std::string& name) {
    ASSIGN_OR_RETURN(const uint32_t number_, number("the dtype of " + name));
    if (number_ >= kDtypes.size()) {
      return wrong(
          name, "dtype " + std::to_string(number_), "0 (f32) to 6 (u8)");
    }
    const Dtype& dtype = kDtypes[number_];
    FileTensor tensor;
    tensor.type = dtype.type;
    ASSIGN_OR_RETURN(const uint32_t rank, number("the rank of " + name));
    if (rank > kMaxDimensions) {
      return wrong(
          name,
          "rank " + std::to_string(rank),
          "at most " + std::to_string(kMaxDimensions));
    }
    tensor.sizes.resize(rank);
    RETURN_IF_ERROR(take(
        tensor.sizes.data(), rank * sizeof(int32_t), "the shape of " + name));
    ASSIGN_OR_RETURN(const uint64_t bytes, bytes_of(name, tensor, dtype));
    // Allocate only if the file has that many bytes.
    if (bytes <= left_) {
      tensor.data.resize(std::max<size_t>(bytes, 1));
    }
    RETURN_IF_ERROR(take(tensor.data.data(), bytes, "the data of " + name));
    if (dtype.type == ScalarType::Bool) {
      for (uint64_t i = 0; i < bytes; ++i) {
        const auto byte = std::to_integer<int>(tensor.data[i]);
        if (byte > 1) {
          return wrong(
              name,
              "the bool " + std::to_string(byte) + " at element " +
                  std::to_string(i),
              "0 or 1");
        }
      }
    }
    return tensor;
  }

  Result<void> end(uint32_t count) const {
    if (left_ != 0) {
      return refuse(
          path_ + " has " + counted(static_cast<int64_t>(left_), "byte") +
          " after its " + counted(count, "tensor") + ", expected none");
    }
    return {};
  }

 private:
  explicit Reader(const std::string& path)
      : path_(path), file_(path, std::ios::binary) {}

  Error wrong(
      const std::string& name,
      const std::string& found,
      const std::string& expected) const {
    return refuse(
        path_ + ": " + name + " has " + found + ", expected " + expected);
  }

  Result<uint64_t> bytes_of(
      const std::string& name,
      const FileTensor& tensor,
      const Dtype& dtype) const {
    // ExecuTorch multiplies the sizes in order, even if one is 0.
    constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
    uint64_t product = dtype.bytes;
    bool empty = false;
    for (const SizesType size : tensor.sizes) {
      if (size < 0) {
        return wrong(name, "size " + std::to_string(size), "at least 0");
      }
      if (size == 0) {
        empty = true;
      } else if (product > kMax / static_cast<uint64_t>(size)) {
        return wrong(
            name,
            "the shape " +
                tensor_text(
                    tensor.type, {tensor.sizes.data(), tensor.sizes.size()}),
            "at most " + std::to_string(kMax) + " bytes");
      } else {
        product *= static_cast<uint64_t>(size);
      }
    }
    return empty ? 0 : product;
  }

  std::string path_;
  std::ifstream file_;
  uint64_t left_ = 0;
};

void append(std::string& bytes, const void* from, size_t n) {
  bytes.append(static_cast<const char*>(from), n);
}

void append_number(std::string& bytes, uint32_t value) {
  append(bytes, &value, sizeof(value));
}

/// Appends a number, as a tensor of rank 0.
template <typename T>
void append_scalar(std::string& bytes, ScalarType type, T value) {
  append_number(
      bytes, static_cast<uint32_t>(find_dtype(type) - kDtypes.data()));
  append_number(bytes, 0);
  append(bytes, &value, sizeof(value));
}

Result<void> append_tensor(
    std::string& bytes,
    const std::string& name,
    const executorch::aten::Tensor& tensor) {
  const Dtype* dtype = find_dtype(tensor.scalar_type());
  if (dtype == nullptr) {
    return Error(
        ETKV_ERROR_DTYPE,
        name + " has dtype " +
            executorch::runtime::toString(tensor.scalar_type()) +
            "; files hold f32, f16, i32, i64, bf16, bool and u8");
  }
  const auto order = tensor.dim_order();
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) {
      return Error(
          ETKV_ERROR_UNSUPPORTED,
          name + " is not row-major; files hold row-major tensors");
    }
  }
  append_number(bytes, static_cast<uint32_t>(dtype - kDtypes.data()));
  append_number(bytes, static_cast<uint32_t>(tensor.dim()));
  append(
      bytes, tensor.sizes().data(), tensor.sizes().size() * sizeof(SizesType));
  if (tensor.nbytes() != 0) {
    append(bytes, tensor.const_data_ptr(), tensor.nbytes());
  }
  return {};
}

} // namespace

Result<std::vector<FileTensor>> read_tensors(const std::string& path) {
  ASSIGN_OR_RETURN(Reader reader, Reader::open(path));
  ASSIGN_OR_RETURN(
      const uint32_t count, reader.number("the number of tensors"));
  std::vector<FileTensor> tensors;
  for (uint32_t i = 0; i < count; ++i) {
    ASSIGN_OR_RETURN(
        FileTensor tensor,
        reader.tensor(
            "tensor " + std::to_string(i) + " of " + std::to_string(count)));
    tensors.push_back(std::move(tensor));
  }
  RETURN_IF_ERROR(reader.end(count));
  return tensors;
}

Result<void> write_tensors(
    const std::string& path,
    const std::vector<EValue>& outputs) {
  std::string bytes;
  append_number(bytes, static_cast<uint32_t>(outputs.size()));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const EValue& output = outputs[i];
    const std::string name = "output " + std::to_string(i);
    if (output.isTensor()) {
      RETURN_IF_ERROR(append_tensor(bytes, name, output.toTensor()));
    } else if (output.isInt()) {
      append_scalar(bytes, ScalarType::Long, output.toInt());
    } else if (output.isBool()) {
      append_scalar(bytes, ScalarType::Bool, output.toBool());
    } else if (output.isDouble()) {
      append_scalar(
          bytes, ScalarType::Float, static_cast<float>(output.toDouble()));
    } else {
      return Error(
          ETKV_ERROR_UNSUPPORTED, name + " is neither a tensor nor a number");
    }
  }
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) {
    return refuse(
        "cannot write the tensors " + path + ": " + std::strerror(errno));
  }
  return {};
}

std::string output_text(const EValue& output) {
  if (output.isTensor()) {
    const auto& tensor = output.toTensor();
    return tensor_text(tensor.scalar_type(), tensor.sizes());
  }
  return tensor_text(
      output.isInt()    ? ScalarType::Long
      : output.isBool() ? ScalarType::Bool
                        : ScalarType::Float,
      {});
}

std::string tensor_text(ScalarType type, ArrayRef<SizesType> sizes) {
  const Dtype* dtype = find_dtype(type);
  std::string text =
      dtype != nullptr ? dtype->name : executorch::runtime::toString(type);
  text += " [";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  }
  return text + "]";
}

} // namespace etkv::examples
