// The C++ types that the bridge's Rust side calls. They know ExecuTorch through
// forward declarations only, so that this header compiles without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "rust/cxx.h"

namespace etkv::bridge {

/// The program's constants, by name.
class Constants {
 public:
  virtual ~Constants() = default;
  /// Finds a constant and keeps it mapped until the next call.
  virtual bool find(rust::Str name) = 0;
  /// The bytes of what was found last.
  virtual rust::Slice<const std::uint8_t> bytes() const = 0;
};

/// Where a program's outputs go.
class Outputs {
 public:
  virtual ~Outputs() = default;
  /// ExecuTorch's number of the dtype that output `index` is to have.
  virtual std::int8_t scalar_type(std::size_t index) const = 0;
  /// Resizes output `index` and copies `bytes` to it; "" if it could.
  virtual rust::String write(
      std::size_t index,
      rust::Slice<const std::int32_t> shape,
      rust::Slice<const std::uint8_t> bytes) = 0;
  /// Sets the integer output `index`.
  virtual void write_integer(std::size_t index, std::int64_t value) = 0;
};

} // namespace etkv::bridge
