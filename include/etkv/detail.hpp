// Helpers that call the C interface from C++, not for users of etkv. A part of
// etkv.hpp.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "etkv/error.h"
#include "etkv/error.hpp"
#include "etkv/result.hpp"

namespace etkv {

namespace detail {
/// A C handle that is freed once.
template <typename T, void (*Free)(T*)>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T* raw) : raw_(raw) {}
  Handle(Handle&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    Handle taken(std::move(other));
    std::swap(raw_, taken.raw_);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() {
    Free(raw_);
  }
  T* get() const {
    return raw_;
  }

 private:
  T* raw_ = nullptr;
};

/// Calls a C function, and returns its error as a Result. The function's last
/// parameter receives the error. `arguments` are the other parameters.
template <typename Function, typename... Arguments>
Result<void> run(Function function, Arguments... arguments) {
  etkv_error* error = nullptr;
  const etkv_status status = function(arguments..., &error);
  if (status == ETKV_OK) {
    return {};
  }
  return Error::adopt(status, error);
}

/// Calls a C function that stores a value through its last parameter but one.
template <typename T, typename Function, typename... Arguments>
Result<T> ask(Function function, Arguments... arguments) {
  T value{};
  etkv_error* error = nullptr;
  const etkv_status status = function(arguments..., &value, &error);
  if (status == ETKV_OK) {
    return value;
  }
  return Error::adopt(status, error);
}

/// Calls a C function that fills an array: once for the number of elements,
/// once for the elements. Repeats both if the number grew in between.
template <typename T, typename Function, typename... Arguments>
Result<std::vector<T>> ask_list(Function function, Arguments... arguments) {
  std::vector<T> list;
  const auto count = [&] {
    return ask<size_t>(function, arguments..., nullptr, size_t{0});
  };
  for (;;) {
    const auto n = count();
    if (!n.ok()) {
      return n.error();
    }
    list.resize(*n);
    const auto found = ask<size_t>(function, arguments..., list.data(), *n);
    if (found.ok() && *found <= *n) {
      list.resize(*found);
      return list;
    }
    // The call failed for a reason other than too little room.
    if (!found.ok() && count().value_or(0) <= *n) {
      return found.error();
    }
  }
}
} // namespace detail

} // namespace etkv
