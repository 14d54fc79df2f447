// The C++ types that the bridge's Rust side calls: those of interpreter.hpp,
// with the bridge's own strings and slices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpp/interpreter.hpp"
#include "rust/cxx.h"

namespace etkv::bridge {

/// Does part `i` of Rust's work at this address.
void run_part(std::size_t task, std::size_t i) noexcept;

/// The program's constants, by name.
class Constants {
 public:
  explicit Constants(interpreter::Constants& host) : host_(host) {}

  bool find(rust::Str name) {
    return host_.find({name.data(), name.size()});
  }
  rust::Slice<const std::uint8_t> bytes() const {
    const auto bytes = host_.bytes();
    if (bytes.data == nullptr) {
      return {};
    }
    return {bytes.data, bytes.size};
  }

 private:
  interpreter::Constants& host_;
};

/// The host that runs the program.
class Host {
 public:
  explicit Host(interpreter::Host& host) : host_(host) {}

  rust::String take(rust::Slice<const interpreter::Argument> outputs) {
    return rust::String::lossy(host_.take({outputs.data(), outputs.size()}));
  }

 private:
  interpreter::Host& host_;
};

/// The threads of the host.
class Threads {
 public:
  explicit Threads(const interpreter::Threads& threads) : threads_(threads) {}

  std::size_t count() const {
    return threads_.count();
  }
  void run(std::size_t n_parts, std::size_t task) const {
    const auto run_one = [](const void* context, std::size_t i) {
      run_part(reinterpret_cast<std::size_t>(context), i);
    };
    threads_.run(n_parts, {run_one, reinterpret_cast<const void*>(task)});
  }

 private:
  const interpreter::Threads& threads_;
};

} // namespace etkv::bridge
